# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""torch.optim.Muon with owners: each rank orthogonalises its share of the matrices, and sends what it found compressed.

    torchrun --nproc-per-node 2 examples/muon_with_owners.py

Gradients are averaged as always (DDP). An update has full rank and near-normal entries, so filters gain nothing:
uniform quantisation with entropy coding is right. Compressed after the orthogonalisation, errors are not amplified.
"""

import cortado
import torch
import torch.distributed as dist
from torch import nn


class MuonWithOwners:
    """Muon over the matrices `parameters`; the options are those of torch.optim.Muon."""

    def __init__(self, parameters, codec="quant(error=0.05, coder=rans)", **options):
        self.parameters = list(parameters)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # Longest work first, to the rank with the least.
        load, self.owners = [0] * world_size, [0] * len(self.parameters)
        for i in sorted(range(len(self.parameters)), key=lambda i: -self.parameters[i].numel()):
            self.owners[i] = load.index(min(load))
            load[self.owners[i]] += self.parameters[i].numel()
        own = [p for p, owner in zip(self.parameters, self.owners, strict=True) if owner == rank]
        self.muon = torch.optim.Muon(own or [nn.Parameter(torch.zeros(1, 1))], **options)
        self.updates = [torch.zeros_like(p) for p in self.parameters]
        self.gather = cortado.CompressedAllGather(self.updates, self.owners, codec, error_feedback=True)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        before = [p.clone() for p in self.parameters]
        self.muon.step()
        for update, parameter, old in zip(self.updates, self.parameters, before, strict=True):
            torch.sub(parameter, old, out=update)
        self.gather(self.updates)  # the owner takes the decoded update too, so that all replicas stay equal
        for update, parameter, old in zip(self.updates, self.parameters, before, strict=True):
            torch.add(old, update, out=parameter)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 64, bias=False))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = MuonWithOwners(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(20):
        inputs = torch.randn(32, 64, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            report = optimizer.gather.report()
            ratio = report["all_dense_bytes"] / report["all_payload_bytes"]
            print(f"step {step + 1}: loss {loss:.4f}, ratio {ratio:.1f} at error {report['relative_error']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
