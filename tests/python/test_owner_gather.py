# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""compressed_all_gather: what owners have computed reaches all ranks; Muon with owners as an example."""

import sys
import time
from pathlib import Path

import cortado
import cortado.owner_gather
import pytest
import torch
from late_device import LateSideStream, on_device

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


def draw_places(me):
    """Random places are of the step, which is saved."""

    def places_of(gather):
        gather(tensors := [torch.ones(400)])
        return tensors[0].nonzero().flatten().tolist()

    first, second = (cortado.CompressedAllGather([torch.ones(400)], [0], "randk(density=0.1)") for _ in range(2))
    drawn = [places_of(first), places_of(first)]
    second.load_state_dict(first.state_dict())
    drawn.append(places_of(first))
    return drawn, places_of(second)


def test_every_step_draws_places_of_its_own_and_a_loaded_one_goes_on(pools):
    for (first, second, third), loaded in pools(2).run(draw_places):
        assert len(first) == 40 and first != second != third != first
        assert loaded == third


def load_with_other_owners(me):
    """Each tensor's owner is the next rank now: it finds what is owed in the states of all, and not in its own."""
    tensors, owners, _ = own_values(me, 0)
    later = [(owner + 1) % me.world_size for owner in owners]
    first = cortado.CompressedAllGather(tensors, owners, "topk(density=0.2)", error_feedback=True)
    first(tensors)
    states = me.gather(first.state_dict())
    owed = {name: values for state in states for name, values in state["residuals"].items()}
    assert sum(values.norm() for values in owed.values()) > 0
    second = cortado.CompressedAllGather(tensors, later, "topk(density=0.2)", error_feedback=True)
    second.load_state_dict(states)
    held = second.state_dict()["residuals"]
    assert len(held) == sum(owner == me.rank and t.numel() > 0 for t, owner in zip(tensors, later, strict=True))
    assert all(torch.equal(values, owed[name]) for name, values in held.items())
    with pytest.warns(UserWarning, match=rf"owed of \d tensors that rank {me.rank} owns .saved with world size 3"):
        second.load_state_dict(states[me.rank])
    assert not any(values.any() for values in second.state_dict()["residuals"].values())
    # What does not fit on one rank is refused by all, and changes none.
    second.load_state_dict(states)
    damages = [
        ("format", lambda state: state.update(format="cortado.kfac/1")),
        ("one step", lambda state: state.update(step=7)),
        ("2 values of tensor 0", lambda state: state["residuals"].update({"tensor 0": torch.zeros(2)})),
        ("Inf or NaN", lambda state: state["residuals"]["tensor 0"].fill_(float("nan"))),
    ]
    for text, damage in damages:
        damaged = me.gather(first.state_dict())
        if me.rank == 1:
            damage(damaged[0])
        with pytest.raises(cortado.CortadoError, match=text):
            second.load_state_dict(damaged)
        now = second.state_dict()["residuals"]
        assert all(torch.equal(values, now[name]) for name, values in held.items())
    second(tensors)


def test_states_of_other_owners(pools):
    pools(3).run(load_with_other_owners)


def load_other_steps(me):
    tensors, owners, _ = own_values(me, 0)
    gather = cortado.CompressedAllGather(tensors, owners, "topk(density=0.2)", error_feedback=True)
    gather(tensors)
    states = [gather.state_dict()]
    gather(tensors)
    states.append(gather.state_dict())
    with pytest.raises(cortado.MismatchError, match="the steps of the states differ: rank 0 has 1, rank 1 has 2"):
        gather.load_state_dict(states[me.rank])


def test_states_of_other_steps_are_refused(pools):
    pools(2).run(load_other_steps)


def codec_of_one_rank(me):
    values = [torch.linspace(-1, 1, 7), torch.ones(2, 2)]
    gather = cortado.CompressedAllGather(values, [0, torch.tensor(2)], "quant(bits=2)")
    with pytest.raises(cortado.CortadoError, match='unknown codec "quat"'):
        gather.set_codec("quat" if me.rank == 1 else "none")
    gather(tensors := [tensor.clone() for tensor in values])
    assert not torch.equal(tensors[0], values[0])  # still two bits
    gather.set_codec("none")
    gather(tensors := [tensor.clone() for tensor in values])
    assert torch.equal(tensors[0], values[0])


def test_a_codec_that_one_rank_misnames_changes_nothing(pools):
    pools(3).run(codec_of_one_rank)


def within_a_subgroup(me):
    group = torch.distributed.new_group([0, 2])
    if me.rank == 1:
        return None
    tensors = [torch.full((3,), float(me.rank)), torch.full((2,), float(me.rank))]
    cortado.compressed_all_gather(tensors, [0, 1], process_group=group)  # ranks of the group
    return [tensor[0].item() for tensor in tensors]


def test_a_subgroup(pools):
    assert pools(3).run(within_a_subgroup) == [[0.0, 2.0], None, [0.0, 2.0]]


class AllReady(LateSideStream):
    """The tensors of an exchange are computed together, before it: copying one is no news of another."""

    def _copy(self, to, source):
        given = self._cuda.compute.given
        super()._copy(to, source)
        del self._cuda.compute._work[given:]
        return to


def gather_on_a_late_device(me):
    """What is read late, behind all that computes it, has the bits that it has on the CPU."""
    spec = "topk(density=0.2)"
    plain = None
    for side_stream in (lambda device: None, AllReady):
        before, cortado.owner_gather.side_stream_of = cortado.owner_gather.side_stream_of, side_stream
        try:
            tensors, owners, _ = own_values(me, 0)
            gather = cortado.CompressedAllGather(tensors, owners, spec, error_feedback=True)
        finally:
            cortado.owner_gather.side_stream_of = before
        history = []
        for step in range(4):
            tensors = [as_strided(tensor) for tensor in own_values(me, step)[0]]
            if gather._side_stream is not None:
                gather._side_stream._cuda.compute.give(lambda: None)  # these tensors
            gather(tensors)
            history.append(tensors)
        if plain is None:
            plain = history
    return all(torch.equal(a, b) for x, y in zip(plain, history, strict=True) for a, b in zip(x, y, strict=True))


def as_strided(tensor):
    """The same values, in another order in memory where there is one."""
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def test_tensors_of_a_device_are_read_and_written_in_time(pools):
    assert pools(3).run(gather_on_a_late_device) == [True] * 3


def refusals(me):
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    with pytest.raises(cortado.SpecError, match="2 tensors and 1 owners"):
        cortado.CompressedAllGather(tensors, [0])
    with pytest.raises(cortado.SpecError, match="float64"):
        cortado.CompressedAllGather([torch.zeros(3).double()], [0])
    with pytest.raises(cortado.SpecError, match="owner must be a rank from 0 to 1, got 2"):
        cortado.CompressedAllGather(tensors, [0, 2])
    with pytest.raises(cortado.SpecError, match="owner of tensor 1 must be a rank, got 1.5"):
        cortado.CompressedAllGather(tensors, [0, 1.5])
    with pytest.raises(cortado.SpecError, match="error_feedback must be True or False, got 1"):
        cortado.CompressedAllGather(tensors, [0, 1], error_feedback=1)
    with pytest.raises(cortado.SpecError, match="aggregate must be a whole number of at least 0, got 2.0"):
        cortado.CompressedAllGather(tensors, [0, 1], aggregate=2.0)
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
    for first, codec, text in ((tensors[0].double(), "none", "float64"), (tensors[0], 3, "a codec is expected here")):
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


def what_came_can_not_be_stored(me):
    """A tensor whose elements share memory, on rank 1 alone: the others hear of it in their next exchange."""
    tensor = torch.zeros(1).expand(3) if me.rank == 1 else torch.zeros(3)
    gather = cortado.CompressedAllGather([tensor], [0])
    begin = time.monotonic()
    with pytest.raises(RuntimeError if me.rank == 1 else cortado.PeerError, match="single memory location"):
        gather([tensor])
        gather([tensor])
    return time.monotonic() - begin


@pytest.mark.parametrize("scenario", [refusals_on_one_rank, a_tensor_has_moved, what_came_can_not_be_stored])
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
