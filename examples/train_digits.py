# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional net on scikit-learn's digits, gradients compressed by Cortado.

    torchrun --nproc-per-node 4 examples/train_digits.py
    torchrun --nproc-per-node 4 examples/train_digits.py --method "power(rank=2)"

`--method` is any Cortado codec string, or `ddp` for PyTorch's own all-reduce.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 16  # images a worker and step


def small_net() -> nn.Module:
    """0.36 M parameters, for images of 8 x 8 points."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images (1, 8, 8) of points between 0 and 1, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="acp(rank=4)", help="how the gradients travel")
    parser.add_argument("--epochs", type=int, default=15)
    arguments = parser.parse_args()
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 29500)):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    ddp = DistributedDataParallel(small_net(), gradient_as_bucket_view=True)
    if arguments.method != "ddp":
        import cortado

        cortado.attach(ddp, arguments.method)
    images, labels = read_digits()
    order = torch.randperm(len(images))  # equal on all ranks, by the seed
    held_out, mine = order[:360], order[360:][rank::world]
    mine = mine[: 1437 // world]  # the same number of batches on every rank
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(arguments.epochs):
        for chosen in mine[torch.randperm(len(mine))].split(BATCH):
            optimizer.zero_grad()
            loss = functional.cross_entropy(ddp(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = ddp.module(images[held_out]).argmax(1) == labels[held_out]
        if rank == 0:
            accuracy = 100 * right.float().mean().item()
            print(f"epoch {epoch + 1:2}  loss {loss.item():.3f}  accuracy {accuracy:.1f} %")
    if rank == 0 and arguments.method != "ddp":
        print(cortado.report(ddp))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
