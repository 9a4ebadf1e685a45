# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""torch.optim.Muon with owners: each rank orthogonalises its share of the matrices, and sends what it found compressed.

    torchrun --nproc-per-node 2 examples/muon_with_owners.py

Gradients are averaged as always (DDP). An update has full rank and near-normal entries, so filters gain nothing:
uniform quantisation with entropy coding is right. Compressed after the orthogonalisation, errors are not amplified.
"""

import torch
import torch.distributed as dist
from optimizer_with_owners import WithOwners, train
from torch import nn


class MuonWithOwners(WithOwners):
    """Muon over the matrices `parameters`; the options are those of torch.optim.Muon."""

    def __init__(self, parameters, codec="quant(error=0.05, coder=rans)", **options):
        super().__init__(parameters, lambda own: torch.optim.Muon(own, **options), codec, cost=torch.numel)
        self.muon = self.inner


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 64, bias=False))
    train(net, lambda parameters: MuonWithOwners(parameters, lr=0.02), steps=20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
