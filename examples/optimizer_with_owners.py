# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Shampoo and SOAP as they are in the package pytorch-optimizer, with owners: each rank computes its share of the
layers and sends what it found compressed.

    pip install pytorch-optimizer
    torchrun --nproc-per-node 2 examples/optimizer_with_owners.py --optimizer SOAP --lr 0.003

The optimizer knows nothing of it: each rank makes one of its own parameters only, so that statistics, roots and
eigenvectors of a layer exist once. Gradients are averaged as always (DDP).
"""

import argparse

import cortado
import torch
import torch.distributed as dist
from torch import nn


def share_out(costs, ranks):
    """The owner of each: the longest work first, to the rank with the least."""
    load, owners = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


def cubes(parameter):
    """What roots or eigenvectors of both sides of a matrix cost, in any unit."""
    rows = parameter.shape[0]
    return rows**3 + (parameter.numel() // rows) ** 3


class WithOwners:
    """An optimizer over `parameters`, of which each rank steps those it owns.

    make: makes the optimizer of the parameters it is given. cost: of a parameter's step, in any unit; it decides who
    owns what. All ranks apply the decoded update, the owner too, so that replicas stay equal to the bit; with error
    feedback the owner adds to an update what encoding it has lost before.
    """

    def __init__(self, parameters, make, codec="quant(error=0.05, coder=rans)", cost=cubes):
        self.parameters = list(parameters)
        self.owners = share_out([cost(parameter) for parameter in self.parameters], dist.get_world_size())
        own = [p for p, owner in zip(self.parameters, self.owners, strict=True) if owner == dist.get_rank()]
        self.inner = make(own or [nn.Parameter(torch.zeros(1, 1))])  # a rank may own nothing
        self.updates = [torch.zeros_like(p) for p in self.parameters]
        self.gather = cortado.CompressedAllGather(self.updates, self.owners, codec, error_feedback=True)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        before = [p.clone() for p in self.parameters]
        self.inner.step()
        for update, parameter, old in zip(self.updates, self.parameters, before, strict=True):
            torch.sub(parameter, old, out=update)
        self.gather(self.updates)
        for update, parameter, old in zip(self.updates, self.parameters, before, strict=True):
            torch.add(old, update, out=parameter)


def train(net, make, steps=40):
    """A regression under DDP with the optimizer that make(parameters) gives; rank 0 prints loss, ratio and error."""
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(steps):
        inputs = torch.randn(32, 64, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % (steps // 4) == 0:
            report = optimizer.gather.report()
            print(f"step {step + 1}: loss {loss:.4f}, {what_travels(report)}")


def what_travels(report):
    """Of the last exchange; one rank sends nothing."""
    if not report["all_payload_bytes"]:
        return "nothing travels"
    ratio = report["all_dense_bytes"] / report["all_payload_bytes"]
    return f"ratio {ratio:.1f} at error {report['relative_error']:.3f}"


def main():
    import pytorch_optimizer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--optimizer", default="Shampoo", help="a class of pytorch_optimizer: Shampoo, SOAP")
    parser.add_argument("--codec", default="quant(error=0.05, coder=rans)")
    parser.add_argument("--lr", type=float, default=0.03)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    optimizer = getattr(pytorch_optimizer, arguments.optimizer)
    train(
        nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)),
        lambda parameters: WithOwners(parameters, lambda own: optimizer(own, lr=arguments.lr), arguments.codec),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
