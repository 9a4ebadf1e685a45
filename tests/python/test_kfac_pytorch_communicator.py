# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The communicator for kfac-pytorch: its call signatures, and what arrives. kfac-pytorch itself is in no package
registry; benchmarks/training/second_order.py runs it over this communicator from a checkout."""

import inspect
import sys
from contextlib import nullcontext as nothing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

# Of kfac-pytorch 0.4.2's TorchDistributedCommunicator: positional parameters, and keywords with their defaults.
SIGNATURES = {
    "allreduce": (["tensor"], {"average": False, "group": None, "symmetric": False}),
    "allreduce_bucketed": (["tensor"], {"average": False, "group": None, "symmetric": False}),
    "broadcast": (["tensor"], {"src": inspect.Parameter.empty, "group": None, "symmetric": False}),
    "flush_allreduce_buckets": ([], {}),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    from kfac_pytorch_communicator import CompressingCommunicator

    parameters = list(inspect.signature(getattr(CompressingCommunicator, name)).parameters.values())[1:]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert (positional, keywords) == SIGNATURES[name]


def result(value):
    return value if isinstance(value, torch.Tensor) else value.wait()


def symmetric_matrix(seed, size):
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return matrix + matrix.T


def sums(me, is_bucketed):
    from kfac_pytorch_communicator import CompressingCommunicator

    communicator = CompressingCommunicator("compso(bound=4e-3)", bucket_cap_mb=3e-4)  # 75 values
    allreduce = communicator.allreduce_bucketed if is_bucketed else communicator.allreduce
    # (size, average, symmetric); the first one and that of 9 rows are above the cap by themselves.
    calls = [(10, False, False), (5, True, True), (9, True, False), (3, False, True), (4, False, False)]
    started = [
        allreduce(symmetric_matrix(10 * me.rank + size, size), average=average, symmetric=symmetric)
        for size, average, symmetric in calls
    ]
    communicator.flush_allreduce_buckets()
    for (size, average, _), future in zip(calls, started, strict=True):
        total = sum(symmetric_matrix(10 * rank + size, size) for rank in range(me.world_size))
        assert torch.allclose(result(future), total / me.world_size if average else total, atol=1e-5)
    if me.world_size > 1:
        with pytest.raises(ValueError, match="as many rows as columns"):
            allreduce(torch.zeros(2, 3), symmetric=True)


@pytest.mark.parametrize("is_bucketed", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_are_exact(pools, world_size, is_bucketed):
    pools(world_size).run(sums, is_bucketed=is_bucketed)


class Broken:
    """A collective that has begun and fails."""

    def get_future(self):
        future = torch.futures.Future()
        future.set_exception(RuntimeError("the link is gone"))
        return future


@pytest.mark.parametrize("fails_at_once", [False, True])
@pytest.mark.parametrize("call", ["allreduce_bucketed", "broadcast"])
def test_who_waits_for_what_has_failed_gets_the_error(monkeypatch, call, fails_at_once):
    from kfac_pytorch_communicator import CompressingCommunicator

    def fail(*_arguments, **_options):
        raise RuntimeError("the link is gone")

    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_reduce", fail if fails_at_once else lambda *_arguments, **_options: Broken())
    communicator = CompressingCommunicator("none")
    monkeypatch.setattr(communicator, "_gather", fail)
    options = {"src": 0} if call == "broadcast" else {"average": True}
    started = [getattr(communicator, call)(torch.ones(3), **options) for _ in range(2)]
    with pytest.raises(RuntimeError, match="the link is gone") if fails_at_once or call == "broadcast" else nothing():
        communicator.flush_allreduce_buckets()
    for future in started:
        assert future.done()
        with pytest.raises(RuntimeError, match="the link is gone"):
            future.wait()


def broadcasts(me, codec, waits_early):
    from kfac_pytorch_communicator import CompressingCommunicator

    communicator = CompressingCommunicator(codec)
    outcome = []
    for step in range(3):
        values = [torch.randn(20, 30, generator=torch.Generator().manual_seed(10 * step + i)) for i in range(4)]
        started = []
        for i, value in enumerate(values):
            src = i % me.world_size
            started.append(communicator.broadcast(value.clone() if src == me.rank else torch.empty(20, 30), src=src))
        if not waits_early:
            communicator.flush_allreduce_buckets()
        received = [result(future) for future in started]
        outcome.append([(got.numpy().copy(), value.numpy()) for got, value in zip(received, values, strict=True)])
    assert len(communicator.gathers) == (me.world_size > 1)  # one for the same tensors of all steps
    for gather in communicator.gathers.values():
        assert gather.report()["steps"] == 3 and gather.report()["collectives"] <= 2
    return outcome


@pytest.mark.parametrize("waits_early", [False, True])
@pytest.mark.parametrize("codec", ["none", "compso(bound=4e-3)"])
def test_broadcasts_travel_together(pools, codec, waits_early):
    outcomes = pools(2).run(broadcasts, codec=codec, waits_early=waits_early)
    for mine, theirs in zip(*outcomes, strict=True):
        for (got, value), (other, _) in zip(mine, theirs, strict=True):
            assert (got == other).all()
            assert (got == value).all() if codec == "none" else 1e-4 < abs(got - value).max() < 0.05


def other_groups(me):
    from kfac_pytorch_communicator import CompressingCommunicator

    rows, inverses = dist.new_group([0, 1]), dist.new_group([0, 1])
    communicator = CompressingCommunicator("compso(bound=1e-1)", groups=[rows])
    values = symmetric_matrix(1, 8)
    own = values.clone() if me.rank == 0 else torch.zeros(8, 8)
    exact = communicator.broadcast(own, src=0, group=inverses)
    assert torch.equal(result(exact), values)  # without a flush
    assert torch.equal(result(communicator.broadcast(own, src=0, group=inverses, symmetric=True)), values)
    doubles = communicator.broadcast(own.double(), src=0, group=rows)  # no type that Cortado takes
    assert torch.equal(result(doubles), values.double())
    rough = communicator.broadcast(own.clone(), src=0, group=rows)
    assert not rough.done()
    communicator.flush_allreduce_buckets()
    assert rough.done() and not torch.equal(result(rough), values)


def test_only_groups_of_gradients_are_compressed(pools):
    pools(2).run(other_groups)
