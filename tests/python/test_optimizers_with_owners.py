# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Examples of owner-computes optimisers: Shampoo and SOAP as pytorch-optimizer has them, and a flat buffer."""

import contextlib
import importlib
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

CODEC = "quant(error=0.05, coder=rans)"


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))


def train(me, net, optimizer, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + me.rank))
        net(inputs).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()


def plain(me, name):
    package = importlib.import_module("pytorch_optimizer")
    net = me.wrap(make_net())
    return train(me, net, getattr(package, name)(net.parameters(), lr=0.01))


def with_owners(me, name, codec):
    from optimizer_with_owners import WithOwners

    package = importlib.import_module("pytorch_optimizer")
    net = me.wrap(make_net())
    optimizer = WithOwners(net.parameters(), lambda own: getattr(package, name)(own, lr=0.01), codec)
    weights = train(me, net, optimizer)
    held = [p.shape for p in optimizer.inner.state]
    return weights, held, optimizer.owners, optimizer.gather.report()


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_optimizers_of_the_package(pools, name):
    pytest.importorskip("pytorch_optimizer", reason="tools/requirements-test.txt is not installed")
    expected = pools(2).run(plain, name=name)[0]
    exact = pools(2).run(with_owners, name=name, codec="compso(bound=0)")
    lossy = pools(2).run(with_owners, name=name, codec=CODEC)
    for rank, ((weights, held, owners, _), (rough, _, _, report)) in enumerate(zip(exact, lossy, strict=True)):
        assert abs(weights - expected).max() < 1e-4  # an update is a difference of rounded weights
        assert 1e-6 < abs(rough - expected).max() < 0.02
        assert set(owners) == {0, 1}
        assert len(held) == owners.count(rank)  # statistics of its share only
        assert 0.02 < report["relative_error"] < 0.08


def alone(me):
    from optimizer_with_owners import WithOwners, train

    net, output = nn.Linear(64, 64), io.StringIO()
    with contextlib.redirect_stdout(output):
        train(net, lambda parameters: WithOwners(parameters, lambda own: torch.optim.SGD(own, lr=0.1), CODEC), steps=4)
    return output.getvalue().splitlines()


def test_one_process_sends_nothing(pools):
    lines = pools(1).run(alone)[0]
    assert len(lines) == 4 and all(line.endswith("nothing travels") for line in lines)


def flat_buffer(me, codec):
    from shampoo_flat_buffer import FlatBufferShampoo

    net = me.wrap(make_net())
    optimizer = FlatBufferShampoo(net.parameters(), lr=0.1, codec=codec)
    weights = train(me, net, optimizer)
    inside = all(
        optimizer.buffer.data_ptr() <= d.data_ptr() < optimizer.buffer.data_ptr() + optimizer.buffer.nbytes
        for d in optimizer.directions
    )
    own = {i for i, owner in enumerate(optimizer.owners) if owner == me.rank}
    return weights, inside and set(optimizer.statistics) == own, optimizer.gather.report()


def test_a_flat_buffer(pools):
    alone = pools(1).run(flat_buffer_of_both_batches)[0]
    exact = pools(2).run(flat_buffer, codec="none")
    lossy = pools(2).run(flat_buffer, codec="compso(error=0.1, round=dead_zone)")
    for (weights, is_right, _), (rough, _, report) in zip(exact, lossy, strict=True):
        assert is_right
        assert abs(weights - alone).max() < 1e-4
        assert 1e-6 < abs(rough - alone).max() < 0.05
        assert 0.05 < report["relative_error"] < 0.15


def flat_buffer_of_both_batches(me, steps=4):
    """What two ranks compute, on one."""
    from shampoo_flat_buffer import FlatBufferShampoo

    net = make_net()
    optimizer = FlatBufferShampoo(net.parameters(), lr=0.1, codec="none")
    for step in range(steps):
        optimizer.zero_grad()
        inputs = [torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        net(torch.cat(inputs)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()
