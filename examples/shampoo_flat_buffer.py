# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Search directions in one flat buffer, as distributed implementations of Shampoo keep them, gathered in place.

    torchrun --nproc-per-node 2 examples/shampoo_flat_buffer.py

Those give every rank a part of the buffer and all-gather it as it is; here it travels compressed. The gather gets a
view of each layer's place, not the part as one tensor: no range is shared by layers of different magnitude.
"""

import cortado
import torch
import torch.distributed as dist
from optimizer_with_owners import cubes, share_out, train
from torch import nn


class FlatBufferShampoo:
    """Shampoo (Gupta et al. 2018) with the norm of the gradient grafted on, each rank with its share of the layers.

    Of a layer's gradient G, as a matrix: L += G G^T, R += G^T G, direction L^(-1/4) G R^(-1/4) |G| / |that|.
    """

    def __init__(self, parameters, lr, codec="compso(error=0.1, round=dead_zone)", epsilon=1e-4):
        self.parameters, self.lr, self.epsilon = list(parameters), lr, epsilon
        self.owners = share_out([cubes(p) for p in self.parameters], dist.get_world_size())
        self.buffer = torch.zeros(sum(p.numel() for p in self.parameters))
        # Rank after rank: what a rank owns is one part of the buffer.
        self.directions, at = {}, 0
        for i in sorted(range(len(self.parameters)), key=lambda i: self.owners[i]):
            parameter = self.parameters[i]
            self.directions[i] = self.buffer[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        self.directions = [self.directions[i] for i in range(len(self.parameters))]
        self.gather = cortado.CompressedAllGather(self.directions, self.owners, codec, error_feedback=True)
        self.statistics = {}

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for i, owner in enumerate(self.owners):
            if owner == dist.get_rank():
                gradient = self.parameters[i].grad
                # On every rank alike: without a gradient there is nothing to send, and all wait for the message.
                self.directions[i].copy_(torch.zeros(()) if gradient is None else self._direction(i, gradient))
        self.gather(self.directions)  # the whole buffer, equal on all ranks
        for parameter, direction in zip(self.parameters, self.directions, strict=True):
            parameter.sub_(direction, alpha=self.lr)

    def _direction(self, i, gradient):
        matrix = gradient.reshape(len(gradient), -1)
        if i not in self.statistics:
            self.statistics[i] = [self.epsilon * torch.eye(size) for size in matrix.shape]
        left, right = self.statistics[i]
        left.addmm_(matrix, matrix.T)
        right.addmm_(matrix.T, matrix)
        direction = inverse_fourth_root(left, self.epsilon) @ matrix @ inverse_fourth_root(right, self.epsilon)
        return (direction * (matrix.norm() / direction.norm().clamp(min=1e-30))).view_as(gradient)


def inverse_fourth_root(matrix, epsilon):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=epsilon).pow(-0.25) @ vectors.T


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    train(net, lambda parameters: FlatBufferShampoo(parameters, lr=1.0))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
