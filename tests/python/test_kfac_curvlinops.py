# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Factors and inverses against an outside implementation: the K-FAC operators of curvlinops-for-pytorch.

Scales differ, by constants of a layer. Both average what comes from N samples of mean loss; curvlinops undoes that mean
in the gradients' factor, and we divide each row of a convolution (patch, and gradient) by its number of positions P:

    A' = P^2 A        G' = M^2 P^3 G        M: terms of the loss, N samples times positions of the output of the net

with P = 1 for linear layers. Damping is on one of the scales, so that it is converted too.
"""

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
}


class TokensLast(nn.CrossEntropyLoss):
    """curvlinops hands over one row for each token; a training loop has (sample, token, class)."""

    def forward(self, output, labels):
        return super().forward(output.flatten(0, -2), labels.flatten())


def data_of(kind):
    generator = torch.Generator().manual_seed(1)
    shape = {"linear": (6,), "convolution": (2, 7, 6), "tokens": (TOKENS, 6)}[kind]
    inputs = torch.randn(SAMPLES, *shape, generator=generator)
    labels = torch.randint(0, 3, (SAMPLES, TOKENS) if kind == "tokens" else (SAMPLES,), generator=generator)
    return inputs, labels


def setting(kind, **options):
    """(net with gradients, K-FAC with factors of this batch alone, its preconditioned layers, loss, data)"""
    torch.manual_seed(0)
    net = NETS[kind]()
    kfac = cortado.KFAC(net, factor_decay=0, kl_clip=None, damping=DAMPING, verbose=False, **options)
    inputs, labels = data_of(kind)
    loss = TokensLast()
    loss(net(inputs), labels).backward()
    return net, kfac, {layer.name: layer for layer in kfac._layers}, loss, (inputs, labels)


def operator_of(net, layer, loss, data):
    """curvlinops' operator of one layer, in double precision where it computes."""
    inputs, labels = data
    if inputs.dim() == 3:  # its convention for sequences: (sample, class, token)
        model = nn.Sequential(*net, Swap())
        name = layer.name
    else:
        model, name = net, layer.name
    operator = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        layer.parameters,
        [(inputs, labels)],
        fisher_type=curvlinops.FisherType.EMPIRICAL,
        kfac_approx=curvlinops.KFACType.EXPAND,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    return operator, name


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
        positions = shapes[0][2] * shapes[0][3]
    return positions**2, data[1].numel() ** 2 * positions**3


def full(triangle, size):
    """Of a triangle as state_dict() has it."""
    matrix = torch.zeros(size, size)
    matrix[tuple(torch.tril_indices(size, size))] = triangle
    return matrix + matrix.tril(-1).T


def distance(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", NETS)
def test_factors(kind):
    net, kfac, layers, loss, data = setting(kind)
    kfac.step()
    state = kfac.state_dict()["layers"]
    assert len(layers) == len(state) == sum(isinstance(m, nn.Linear | nn.Conv2d) for m in net.modules())
    for name, layer in layers.items():
        operator, key = operator_of(net, layer, loss, data)
        a_scale, g_scale = scales_of(layer, net, data)
        a, g = operator._input_covariances[key], operator._gradient_covariances[key]
        assert distance(a_scale * full(state[name]["a_factor"], len(a)), a) < 1e-5
        assert distance(g_scale * full(state[name]["g_factor"], len(g)), g) < 1e-5


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
    net, kfac, layers, loss, data = setting(kind, **options)
    gradients = {name: [p.grad.clone() for p in layer.parameters] for name, layer in layers.items()}
    kfac.step()
    for name, layer in layers.items():
        operator, _ = operator_of(net, layer, loss, data)
        a_scale, g_scale = scales_of(layer, net, data)
        inverse = curvlinops.KFACInverseLinearOperator(operator, **damping(a_scale, g_scale))
        expected = [a_scale * g_scale * part for part in inverse @ gradients[name]]
        for parameter, part in zip(layer.parameters, expected, strict=True):
            assert distance(parameter.grad, part) < 1e-4
