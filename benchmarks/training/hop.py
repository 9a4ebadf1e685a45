# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What does one hop from DDP into Python cost, for each bucket?

A model of many tiny buckets goes through the backward pass in turn without any exchange (no_sync), with a hook that
does nothing, with Cortado, and with DDP's own all-reduce. One process by default, where Cortado sends nothing: what is
left over the pass without exchange is the hop. Under `torchrun --nproc-per-node N` the all-reduces come on top, and the
last column, time in Cortado's hook without encoding, decoding and waiting, is what to look at. Medians, in microseconds
a bucket.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time

import cortado
import torch
import torch.distributed as dist

BUCKETS = 64
WIDTH = 16
NO_EXCHANGE, DDP, EMPTY, CORTADO = "no exchange", "DDP", "empty hook", ["none", "acp(rank=4)"]
METHODS = [NO_EXCHANGE, EMPTY, *CORTADO, DDP]


def pass_through(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def make_model(method: str) -> torch.nn.parallel.DistributedDataParallel:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)))
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    if method == EMPTY:
        model.register_comm_hook(None, pass_through)
    elif method in CORTADO:
        cortado.attach(model, method, verbose=False)
    return model


def backward_us(method: str, model: torch.nn.parallel.DistributedDataParallel) -> float:
    model.zero_grad()
    with model.no_sync() if method == NO_EXCHANGE else contextlib.nullcontext():
        loss = model(torch.ones(1, WIDTH)).sum()
        start = time.perf_counter()
        loss.backward()
        return (time.perf_counter() - start) * 1e6


def time_in_hook_us(model: torch.nn.Module) -> float:
    """Spent in Cortado's hook since the start, less what the engine spent encoding, decoding and waiting."""
    report = cortado.report(model).to_dict()
    engine_ns = sum(ns for stage, ns in report["time_by_stage_ns"].items() if stage != "communicate")
    return (report["hook_ns"] - engine_ns) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.set_num_threads(1)
    alone = "RANK" not in os.environ
    with tempfile.NamedTemporaryFile() as store:
        where = {"init_method": f"file://{store.name}", "rank": 0, "world_size": 1} if alone else {}
        dist.init_process_group("gloo", **where)
        models = {method: make_model(method) for method in METHODS}
        for _ in range(10):  # dense steps, and DDP's bucket rebuild
            for method, model in models.items():
                backward_us(method, model)
        total_us = {method: [] for method in METHODS}
        in_hook_us = {method: [] for method in CORTADO}
        for _ in range(steps):  # in turn, so that a busy moment of the machine hits all
            for method, model in models.items():
                before = time_in_hook_us(model) if method in CORTADO else 0.0
                total_us[method].append(backward_us(method, model))
                if method in CORTADO:
                    in_hook_us[method].append(time_in_hook_us(model) - before)
        if dist.get_rank() == 0:
            print_table(total_us, in_hook_us, steps)
        dist.destroy_process_group()


def print_table(total_us: dict[str, list[float]], in_hook_us: dict[str, list[float]], steps: int) -> None:
    print(
        f"{BUCKETS} buckets of {WIDTH * WIDTH * 4} B, {dist.get_world_size()} ranks, {steps} steps, "
        f"torch {torch.__version__}, cortado {cortado.__version__}; median us a bucket"
    )
    print(f"{'method':<12} {'backward':>9} {'over no exchange':>17} {'in the hook':>12}")
    base = statistics.median(total_us[NO_EXCHANGE])
    for method, values in total_us.items():
        median = statistics.median(values)
        line = f"{method:<12} {median / BUCKETS:>9.1f} {(median - base) / BUCKETS:>17.1f}"
        if method in in_hook_us:
            line += f" {statistics.median(in_hook_us[method]) / BUCKETS:>12.1f}"
        print(line)


if __name__ == "__main__":
    main()
