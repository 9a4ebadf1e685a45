# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `fully_sharded.py`: one process a rank, which trains by one method after the other, in turn."""

import time

import cortado
import torch
import torch.distributed as dist
from models import gpt
from topology_worker import count
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trainer import emit, mean_over_ranks, start_worker

NATIVE, NATIVE_BF16, NOTHING = "fully_shard", "fully_shard in bf16", "no exchange between machines"
SHARDS = 2


class Trainer:
    """Replicas of SHARDS ranks each; equal weights and batches whatever the method. In one of the first two fully_shard
    averages over everything, else it does within a replica, and a Reducer between them, if there is one."""

    def __init__(self, method: str):
        torch.manual_seed(0)
        # Of its own: Reducers that share a process group send nothing during the backward pass.
        machines = dist.get_world_size() // SHARDS
        mesh = init_device_mesh("cpu", (machines, SHARDS), mesh_dim_names=("replicate", "shard"))
        self.replicas = mesh["replicate"].get_group()
        task = gpt()
        self.model = task.build()
        is_native = method in (NATIVE, NATIVE_BF16)
        sums = torch.bfloat16 if method == NATIVE_BF16 else None
        policy = MixedPrecisionPolicy(reduce_dtype=sums)
        for part in [*self.model.blocks, self.model]:
            fully_shard(part, mesh=mesh if is_native else mesh["shard"], mp_policy=policy)
        self.reducer = None
        if not is_native and method != NOTHING:
            self.reducer = cortado.Reducer(self.model, method, process_group=self.replicas, verbose=False)
        self.loss = task.loss
        self.optimizer = task.optimizer(self.model.parameters())
        self.batches = task.batches(dist.get_rank())

    def step(self) -> tuple[float, float]:
        """This rank's loss, and the seconds it took."""
        inputs, targets = next(self.batches)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        if self.reducer is not None:
            self.reducer.wait()
        self.optimizer.step()
        return loss.item(), time.perf_counter() - start

    def replicas_equal(self) -> bool:
        with torch.no_grad():
            own = torch.cat([parameter.to_local().flatten() for parameter in self.model.parameters()])
        low, high = own.clone(), own.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.replicas)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.replicas)
        return torch.equal(low, high)


def main() -> None:
    config = start_worker()
    trainers = [Trainer(method) for method in config["methods"]]
    for number, trainer in enumerate(trainers):
        for _ in range(config["discard"]):
            trainer.step()
        count(number)
        trainer.step()
        trainer.step()  # of acp each sends something else
        count(number)
    emit("begin")
    for _ in range(config["rounds"]):
        for number, trainer in enumerate(trainers):
            dist.barrier()
            steps = [trainer.step() for _ in range(config["steps"])]
            seconds = mean_over_ranks([seconds for _, seconds in steps])
            emit("timed", method=number, seconds=seconds)
    for number, trainer in enumerate(trainers):
        loss = mean_over_ranks([trainer.step()[0] for _ in range(4)])
        error = trainer.reducer.report().to_dict()["relative_error"] if trainer.reducer is not None else 0.0
        equal = mean_over_ranks([trainer.replicas_equal()])[0] == 1
        emit("ended", method=number, loss=sum(loss) / len(loss), error=mean_over_ranks([error])[0], equal=equal)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
