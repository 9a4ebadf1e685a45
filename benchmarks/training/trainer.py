# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""One model in training by one method, on one rank; and what a worker process does at its start."""

import copy
import datetime
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from methods import wrap
from models import Task

GLOO_TIMEOUT_S = 240


def start_worker() -> dict:
    """Pins this rank to a core, joins the group, and returns the configuration (first argument). With a device, whose
    driver has threads of its own, the rank has its share of the cores."""
    config = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    shared = config.get("device", "cpu") == "cpu" or len(cores) < world
    os.sched_setaffinity(0, {cores[rank % len(cores)]} if shared else set(cores[rank::world]))
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GLOO_TIMEOUT_S)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
    return config


def emit(event: str, **fields) -> None:
    """Sends one event to the program that started the workers; rank 0 only."""
    if dist.get_rank() == 0:
        print(json.dumps({"event": event, **fields}), flush=True)


def mean_over_ranks(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def replicas_equal(model) -> bool:
    """Whether every rank has the same parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int32)
    low, high = own.clone(), own.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return torch.equal(low, high)


def sent_bytes() -> int | None:
    """Bytes this rank's own interface has sent; None on loopback, which all ranks share."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0" and os.environ["GLOO_SOCKET_IFNAME"] == "eth0":
            return int(counters.split()[8])
    return None


class Trainer:
    """Equal seeds give equal initial weights and equal batches, whatever the method."""

    def __init__(self, task: Task, method: str, seed: int = 0, device: str = "cpu"):
        torch.manual_seed(seed)
        self.device = device
        self.wrapped = wrap(task.build().to(device), method)
        self.loss = task.loss
        self.optimizer = task.optimizer(self.wrapped.ddp.parameters())
        self.batches = task.batches(1000 * seed + dist.get_rank())
        self.steps_done = 0

    def step(self) -> tuple[float, float]:
        """One training step; returns this rank's loss and the seconds it took."""
        inputs, targets = (each.to(self.device) for each in next(self.batches))
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with self.wrapped.step_context():
            loss = self.loss(self.wrapped.ddp(inputs), targets)
            loss.backward()
        self.wrapped.end_backward()
        self.optimizer.step()
        value = loss.item()
        self.steps_done += 1
        return value, time.perf_counter() - start

    def go_on_from(self, other: "Trainer") -> None:
        """Takes the weights and the optimiser's state of another trainer of the same task."""
        self.wrapped.ddp.load_state_dict(other.wrapped.ddp.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def check_trains(self) -> None:
        """Raises where the first layer has no gradient, as behind units that are all dead: codecs whose payload depends
        on the values would have nothing to send."""
        if not next(self.wrapped.ddp.parameters()).grad.count_nonzero():
            raise RuntimeError(
                f"the gradient of the first layer is 0 after {self.steps_done} steps: nothing is trained"
            )

    def measure_error(self) -> float:
        """Takes two more steps (ACP sends P in one and Q in the other); mean over the ranks."""
        if not self.wrapped.method.communicates or self.wrapped.method.codec == "ddp":
            return 0.0
        self.wrapped.set_probe(True)
        for _ in range(2):
            self.step()
        self.wrapped.set_probe(False)
        return mean_over_ranks([self.wrapped.relative_error()])[0]

    def replicas_equal(self) -> bool:
        return replicas_equal(self.wrapped.ddp)
