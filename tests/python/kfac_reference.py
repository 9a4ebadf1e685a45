# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""K-FAC in NumPy and double precision, written from the formulas of docs/second_order.md.

It watches a model with hooks of its own; patches of convolutions come from torch's unfold, as Cortado's do not.
"""

import numpy as np
import torch
import torch.nn.functional as F


class Reference:
    def __init__(self, model, names, *, damping=1e-3, factor_decay=0.95, kl_clip=1e-3, lr=0.1, pi=False, eigen=True):
        self.modules = {name: model.get_submodule(name) for name in names}
        self.damping, self.decay, self.kl_clip, self.lr = damping, factor_decay, kl_clip, lr
        self.pi, self.eigen = pi, eigen
        self.factors = {}  # name -> (A, G) of each group
        self.batches = {name: ([], []) for name in names}
        for name, module in self.modules.items():
            module.register_forward_hook(lambda m, i, o, name=name: self._watch(name, m, i[0], o))

    def _watch(self, name, module, inputs, output):
        self.batches[name][0].append([_mean(x) for x in _rows_of_inputs(module, inputs.detach().double())])
        output.register_hook(
            lambda grad: self.batches[name][1].append([_mean(d) for d in _rows_of_outputs(module, grad.double())])
        )

    def means(self):
        """{name: (A, G)} of the batches since the last call, each a list of a matrix for each group."""
        means = {}
        for name, sides in self.batches.items():
            if sides[0]:
                means[name] = tuple([np.mean(group, axis=0) for group in zip(*side, strict=True)] for side in sides)
        self.batches = {name: ([], []) for name in self.batches}
        return means

    def update(self, means):
        for name, sides in means.items():
            old = self.factors.get(name) or tuple([np.eye(len(m)) for m in side] for side in sides)
            self.factors[name] = tuple(
                [self.decay * o + (1 - self.decay) * n for o, n in zip(olds, news, strict=True)]
                for olds, news in zip(old, sides, strict=True)
            )

    def precondition(self, gradients):
        """{name: matrix with the bias as last column} from {name: the same of gradients}."""
        results = {}
        for name, gradient in gradients.items():
            a, g = self.factors[name]
            blocks = np.split(gradient, len(a))
            results[name] = np.concatenate([self._solve(*x) for x in zip(a, g, blocks, strict=True)])
        clip = 1.0
        if self.kl_clip:
            product = sum((results[name] * gradients[name]).sum() for name in gradients)
            clip = min(1.0, np.sqrt(self.kl_clip / abs(product * self.lr**2)))
        return {name: clip * result for name, result in results.items()}

    def _solve(self, a, g, w):
        pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g))) if self.pi else 1.0
        if not self.eigen or self.pi:
            split = (pi * self.damping**0.5, self.damping**0.5 / pi) if self.pi else (self.damping, self.damping)
            return np.linalg.solve(g + split[1] * np.eye(len(g)), w) @ np.linalg.inv(a + split[0] * np.eye(len(a)))
        d_a, q_a = np.linalg.eigh(a)
        d_g, q_g = np.linalg.eigh(g)
        return q_g @ ((q_g.T @ w @ q_a) / (np.outer(d_g.clip(0), d_a.clip(0)) + self.damping)) @ q_a.T


def gradients_of(model, names):
    matrices = {}
    for name in names:
        module = model.get_submodule(name)
        matrix = module.weight.grad.double().flatten(1)
        if module.bias is not None and module.bias.grad is not None:
            matrix = torch.cat([matrix, module.bias.grad.double()[:, None]], 1)
        matrices[name] = matrix.numpy().copy()
    return matrices


def _mean(rows):
    return rows.T @ rows / len(rows)


def _rows_of_inputs(module, inputs):
    """A list of one array for each group: a row for each sample and position."""
    if isinstance(module, torch.nn.Linear):
        rows = [inputs.reshape(-1, inputs.shape[-1]).numpy()]
        share = 1.0
    else:
        rows, share = _patches(module, inputs)
    if module.bias is None:
        return rows
    return [np.concatenate([x, np.full((len(x), 1), share)], axis=1) for x in rows]


def _patches(module, inputs):
    two_d = inputs.unsqueeze(2) if isinstance(module, torch.nn.Conv1d) else inputs
    one = (1,) * (2 - len(module.kernel_size))
    kernel, stride, dilation = (one + getattr(module, key) for key in ("kernel_size", "stride", "dilation"))
    padding = list(module._reversed_padding_repeated_twice) + [0, 0] * (2 - len(module.kernel_size))
    padded = F.pad(two_d, padding, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
    rows = []
    for group in padded.chunk(module.groups, dim=1):
        columns = F.unfold(group, kernel, dilation=dilation, stride=stride)  # images x features x positions
        share = 1.0 / columns.shape[2]
        rows.append(columns.transpose(1, 2).reshape(-1, columns.shape[1]).numpy() * share)
    return rows, share


def _rows_of_outputs(module, gradients):
    if isinstance(module, torch.nn.Linear):
        return [gradients.reshape(-1, gradients.shape[-1]).numpy()]
    flat = gradients.flatten(2)
    return [
        group.transpose(1, 2).reshape(-1, group.shape[1]).numpy() / flat.shape[2]
        for group in flat.chunk(module.groups, dim=1)
    ]
