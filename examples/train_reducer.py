# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Trains on scikit-learn's digits without DDP: a training loop of one's own, with micro-batches and clipping.

torchrun --nproc-per-node 4 examples/train_reducer.py
torchrun --nproc-per-node 4 examples/train_reducer.py --plan "topk(density=0.01)"
mpirun -n 4 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 -x OMP_NUM_THREADS=1 python examples/train_reducer.py
"""

import argparse
import contextlib
import os

import cortado
import torch
import torch.distributed as dist
from torch.nn import functional
from train_digits import read_digits, small_net

BATCH = 16  # images a worker and backward pass
MICRO_BATCHES = 2  # backward passes a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", default="acp(rank=4)", help="how the gradients travel")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    for name, of_mpirun in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
        if of_mpirun in os.environ:  # Open MPI's; torchrun sets RANK and WORLD_SIZE itself
            os.environ.setdefault(name, os.environ[of_mpirun])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    net = small_net()  # starts with the parameters of rank 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    images, labels = read_digits()
    held_out, mine = slice(0, 360), torch.arange(360, len(images))[rank::world]
    with cortado.Reducer(net, arguments.plan) as reducer:
        for step in range(arguments.steps):
            optimizer.zero_grad()
            for micro_batch in range(MICRO_BATCHES):
                chosen = mine[torch.randint(len(mine), (BATCH,))]
                is_last = micro_batch == MICRO_BATCHES - 1
                with contextlib.nullcontext() if is_last else reducer.no_sync():
                    loss = functional.cross_entropy(net(images[chosen]), labels[chosen]) / MICRO_BATCHES
                    loss.backward()  # in the last pass gradients travel meanwhile
            reducer.wait()  # every .grad is the mean over the workers
            torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            if rank == 0 and (step + 1) % 50 == 0:
                with torch.no_grad():
                    right = net(images[held_out]).argmax(1) == labels[held_out]
                print(f"step {step + 1:4}  accuracy {100 * right.float().mean().item():.1f} %", flush=True)
        if rank == 0:
            print(cortado.report(reducer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
