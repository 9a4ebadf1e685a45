# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Factors and inverses against an outside implementation: the K-FAC operators of curvlinops-for-pytorch.

Scales differ, by constants of a layer. Both average what comes from N samples of mean loss; curvlinops undoes that mean
in the gradients' factor, and we divide each row of a convolution (patch, and gradient) by its number of positions P:

    A' = P^2 A        G' = M^2 P^3 G        M: terms of the loss, N samples times positions of the output of the net

with P = 1 for linear layers. Damping is on one of the scales, so that it is converted too.

Of convolutions it knows those of two dimensions without groups: it is given a twin of the net, made of such (Parts).
"""

import copy
import itertools
import warnings

import cortado
import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of curvlinops' own dependencies
    curvlinops = pytest.importorskip("curvlinops", reason="tools/requirements-oracle.txt is not installed")

SAMPLES, TOKENS, DAMPING = 5, 4, 0.03
NETS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3, bias=False)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2, dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(30, 3),
    ),
    "tokens": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "one dimension": lambda: nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv1d(4, 3, 2, dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(9, 3),
    ),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.Tanh(),
        nn.Flatten(2),
        nn.Conv1d(4, 6, 3, padding=1, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(72, 3),
    ),
}
SHAPES = {
    "linear": (6,),
    "convolution": (2, 7, 6),
    "tokens": (TOKENS, 6),
    "one dimension": (2, 9),
    "groups": (2, 7, 6),
}


class TokensLast(nn.CrossEntropyLoss):
    """curvlinops hands over one row for each token; a training loop has (sample, token, class)."""

    def forward(self, output, labels):
        return super().forward(output.flatten(0, -2), labels.flatten())


def data_of(kind):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, *SHAPES[kind], generator=generator)
    labels = torch.randint(0, 3, (SAMPLES, TOKENS) if kind == "tokens" else (SAMPLES,), generator=generator)
    return inputs, labels


def setting(kind, **options):
    """(net with gradients, its twin, K-FAC with factors of this batch alone, its preconditioned layers, loss, data)"""
    torch.manual_seed(0)
    net = NETS[kind]()
    twin = nn.Sequential(*(Parts(m) if isinstance(m, nn.Conv1d | nn.Conv2d) else copy.deepcopy(m) for m in net))
    kfac = cortado.KFAC(net, factor_decay=0, kl_clip=None, damping=DAMPING, verbose=False, **options)
    inputs, labels = data_of(kind)
    loss = TokensLast()
    loss(net(inputs), labels).backward()
    return net, twin, kfac, {layer.name: layer for layer in kfac._layers}, loss, (inputs, labels)


class Parts(nn.Module):
    """A convolution as one for each group; one of one dimension as of two, on images one point high."""

    def __init__(self, module):
        super().__init__()
        self.is_flat = isinstance(module, nn.Conv1d)
        self.parts = nn.ModuleList(self._part(module, weight) for weight in module.weight.chunk(module.groups))
        if module.bias is not None:
            for part, bias in zip(self.parts, module.bias.chunk(module.groups), strict=True):
                part.bias = nn.Parameter(bias.detach().clone())

    def _part(self, module, weight):
        weight = weight.unsqueeze(2) if self.is_flat else weight
        padding, stride, dilation = (
            (least, *given) if self.is_flat else given
            for least, given in [(0, module.padding), (1, module.stride), (1, module.dilation)]
        )
        part = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:], stride, padding, dilation, bias=False)
        part.weight = nn.Parameter(weight.detach().clone())
        return part

    def forward(self, x):
        x = x.unsqueeze(2) if self.is_flat else x
        x = torch.cat([part(own) for part, own in zip(self.parts, x.chunk(len(self.parts), 1), strict=True)], 1)
        return x.squeeze(2) if self.is_flat else x


def parts_of(layer, twin):
    """{name in the twin: module} of what the layer is there, in the order of its groups."""
    name = f"{layer.name}.parts." if layer.is_convolution else layer.name
    return {key: m for key, m in twin.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and key.startswith(name)}


def operator_of(twin, part, loss, data):
    """curvlinops' operator of one layer of the twin, in double precision where it computes."""
    inputs, labels = data
    operator = curvlinops.KFACLinearOperator(
        nn.Sequential(*twin, Swap()) if labels.dim() == 2 else twin,  # its convention: (sample, class, token)
        nn.CrossEntropyLoss(),
        list(part.parameters()),
        [(inputs, labels)],
        fisher_type=curvlinops.FisherType.EMPIRICAL,
        kfac_approx=curvlinops.KFACType.EXPAND,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    return operator


class Swap(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def scales_of(layer, net, data):
    """(A' over A, G' over G)"""
    positions = 1
    if layer.is_convolution:
        shapes = []
        handle = layer.module.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
        net(data[0])
        handle.remove()
        positions = shapes[0][2:].numel()
    return positions**2, data[1].numel() ** 2 * positions**3


def full(triangles, count):
    """The matrices of `count` triangles, one behind the other, as state_dict() has those of a layer's groups."""
    for triangle in triangles.chunk(count):
        size = next(n for n in itertools.count() if n * (n + 1) // 2 == len(triangle))
        matrix = torch.zeros(size, size)
        matrix[tuple(torch.tril_indices(size, size))] = triangle
        yield matrix + matrix.tril(-1).T


def distance(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", NETS)
def test_factors(kind):
    net, twin, kfac, layers, loss, data = setting(kind)
    kfac.step()
    torch.testing.assert_close(twin(data[0]), net(data[0]))
    state = kfac.state_dict()["layers"]
    assert len(layers) == len(state) == sum(isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d) for m in net.modules())
    for name, layer in layers.items():
        a_scale, g_scale = scales_of(layer, net, data)
        parts = parts_of(layer, twin)
        assert len(parts) == layer.groups
        ours = (full(state[name][factor], layer.groups) for factor in ("a_factor", "g_factor"))
        for (key, part), a, g in zip(parts.items(), *ours, strict=True):
            operator = operator_of(twin, part, loss, data)
            assert distance(a_scale * a, operator._input_covariances[key]) < 1e-5
            assert distance(g_scale * g, operator._gradient_covariances[key]) < 1e-5


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(
    "options, damping",
    [
        ({}, lambda a, g: {"damping": a * g * DAMPING, "use_exact_damping": True}),
        ({"compute_method": "inverse"}, lambda a, g: {"damping": (a * DAMPING, g * DAMPING)}),
        ({"pi_correction": True}, lambda a, g: {"damping": a * g * DAMPING, "use_heuristic_damping": True}),
    ],
    ids=["eigen", "inverse", "pi"],
)
def test_preconditioned_gradients(kind, options, damping):
    net, twin, kfac, layers, loss, data = setting(kind, **options)
    loss(twin(data[0]), data[1]).backward()
    kfac.step()
    for layer in layers.values():
        a_scale, g_scale = scales_of(layer, net, data)
        for number, part in enumerate(parts_of(layer, twin).values()):
            inverse = curvlinops.KFACInverseLinearOperator(
                operator_of(twin, part, loss, data), **damping(a_scale, g_scale)
            )
            gradients = [parameter.grad for parameter in part.parameters()]
            expected = [a_scale * g_scale * found for found in inverse @ gradients]
            for parameter, found in zip(layer.parameters, expected, strict=True):
                own = parameter.grad.chunk(layer.groups)[number]
                assert distance(own, found.reshape(own.shape)) < 1e-4
