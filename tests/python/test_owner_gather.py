# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""compressed_all_gather: what owners have computed reaches all ranks; Muon with owners as an example."""

import sys
import time
from pathlib import Path

import cortado
import pytest
import torch
from late_device import on_device

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

SHAPES = [(12, 5), (7,), (), (3, 4, 2), (0, 3)]


def own_values(me, step, dtype=torch.float32):
    """The tensors, with the values of their owners; those of other ranks are something else."""
    owners = [i % me.world_size for i in range(len(SHAPES))]
    generator = torch.Generator().manual_seed(step)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return (
        [v.clone() if o == me.rank else torch.full_like(v, -9) for v, o in zip(values, owners, strict=True)],
        owners,
        values,
    )


def gather_once(me, codec, dtype):
    tensors, owners, values = own_values(me, 0, dtype)
    cortado.compressed_all_gather(tensors, owners, codec)
    return [(t.double().numpy(), v.double().numpy()) for t, v in zip(tensors, values, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["none", "compso(bound=0)", "quant(bits=8)", {"codec": "compso", "bound": 0.05}])
def test_every_rank_gets_the_same(pools, codec, dtype):
    ranks = pools(3).run(gather_once, codec=codec, dtype=dtype)
    exact = codec in ("none", "compso(bound=0)")
    for tensors in ranks:
        for (got, value), (first, _) in zip(tensors, ranks[0], strict=True):
            assert (got == first).all()
            assert (got == value).all() if exact else abs(got - value).max(initial=0) < 0.4


def gather_often(me):
    """With feedback the sums agree; and a saved gather continues with the same bits."""
    tensors, owners, _ = own_values(me, 0)
    spec = "topk(density=0.2)"
    gather = cortado.CompressedAllGather(tensors, owners, spec, error_feedback=True)
    sums, exact = [torch.zeros(s) for s in SHAPES], [torch.zeros(s) for s in SHAPES]
    copy = None
    for step in range(20):
        tensors, _, values = own_values(me, step)
        if copy is not None:
            again = [t.clone() for t in tensors]
            copy(again)
        gather(tensors)
        if copy is not None:
            assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))
        if step == 10:
            copy = cortado.CompressedAllGather(tensors, owners, spec, error_feedback=True)
            copy.load_state_dict(on_device(gather.state_dict()))
        for i in range(len(SHAPES)):
            sums[i] += tensors[i]
            exact[i] += values[i]
    for name, owed in gather.state_dict()["residuals"].items():
        i = int(name.split()[1])
        assert torch.allclose(sums[i] + owed.view(SHAPES[i]), exact[i], atol=1e-4)
    report = gather.report()
    assert report["steps"] == 20 and report["collectives"] == 1
    assert report["all_payload_bytes"] < report["all_dense_bytes"] + 8 * len(SHAPES)
    return report["relative_error"]


def test_feedback_and_saving(pools):
    assert max(pools(2).run(gather_often)) > 0.3


def refusals(me):
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    with pytest.raises(cortado.SpecError, match="2 tensors and 1 owners"):
        cortado.CompressedAllGather(tensors, [0])
    with pytest.raises(cortado.SpecError, match="float64"):
        cortado.CompressedAllGather([torch.zeros(3).double()], [0])
    with pytest.raises(cortado.SpecError, match="owner must be a rank from 0 to 1, got 2"):
        cortado.CompressedAllGather(tensors, [0, 2])
    with pytest.raises(cortado.MismatchError, match="tensor 1 of rank 1 differs"):
        cortado.CompressedAllGather(tensors, [0, me.rank])
    gather = cortado.CompressedAllGather(tensors, [0, 1])
    with pytest.raises(cortado.SpecError, match="other shapes"):
        gather([torch.zeros(3), torch.zeros(4)])


def test_wrong_arguments(pools):
    pools(2).run(refusals)


def refusals_on_one_rank(me):
    """What is wrong on rank 1 alone ends the wait of the others, whose timeout is half an hour."""
    tensors, is_wrong = [torch.zeros(3), torch.zeros(2, 2)], me.rank == 1
    begin = time.monotonic()
    for first, codec, text in ((tensors[0].double(), "none", "float64"), (tensors[0], 3, "must be a codec string")):
        with pytest.raises(cortado.SpecError if is_wrong else cortado.MismatchError, match=text):
            first, codec = (first, codec) if is_wrong else (tensors[0], "none")
            cortado.compressed_all_gather([first, tensors[1]], [0, 2], codec)
    gather = cortado.CompressedAllGather(tensors, [0, 2])
    gather(tensors)
    with pytest.raises(cortado.SpecError if is_wrong else cortado.PeerError, match="other shapes"):
        gather([torch.zeros(4) if is_wrong else tensors[0], tensors[1]])
    return time.monotonic() - begin


def a_tensor_has_moved(me):
    """Its address, of rank 1 alone, is none of this memory."""
    gather = cortado.CompressedAllGather([torch.zeros(3)], [1])
    begin = time.monotonic()
    with pytest.raises(cortado.SpecError if me.rank == 1 else cortado.PeerError, match="tensor 0 is on meta, expected"):
        gather([torch.zeros(3, device="meta" if me.rank == 1 else "cpu")])
    return time.monotonic() - begin


@pytest.mark.parametrize("scenario", [refusals_on_one_rank, a_tensor_has_moved])
def test_an_error_on_one_rank_ends_all(pools, scenario):
    try:
        assert max(pools(3).run(scenario)) < 20
    finally:
        pools(3).close()


def muon(me, codec, steps=3):
    from muon_with_owners import MuonWithOwners

    torch.manual_seed(0)
    net = me.wrap(
        torch.nn.Sequential(torch.nn.Linear(12, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 8, bias=False))
    )
    optimizer = MuonWithOwners(list(net.parameters()), codec=codec, lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + me.rank))
        net(inputs).square().mean().backward()
        optimizer.step()
    held = sum(len(state) > 0 for state in optimizer.muon.state.values())
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy(), held, optimizer.gather.report()


def plain_muon(me, steps=3):
    torch.manual_seed(0)
    net = me.wrap(
        torch.nn.Sequential(torch.nn.Linear(12, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 8, bias=False))
    )
    optimizer = torch.optim.Muon(net.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + me.rank))
        net(inputs).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with 2.9")
def test_muon_with_owners(pools):
    expected = pools(2).run(plain_muon)[0]
    exact = pools(2).run(muon, codec="compso(bound=0)")
    lossy = pools(2).run(muon, codec="quant(error=0.05, coder=rans)")
    for (weights, held, _), (rough, _, report) in zip(exact, lossy, strict=True):
        assert held == 1  # the momentum of its share only
        assert abs(weights - expected).max() < 1e-5  # an update is a difference of rounded weights
        assert 1e-6 < abs(rough - expected).max() < 0.02
        assert 0.02 < report["relative_error"] < 0.08
