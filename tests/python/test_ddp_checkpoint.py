# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Saving and loading: the same bits on the same world size, a written policy for another, refusals on every rank."""

import contextlib
import copy
import io

import cortado
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from late_device import on_device
from nets import (
    COMPOSED,
    COMPSO,
    DGC,
    FLOAT_RANS,
    FP8,
    PUBLISHED,
    QUANT,
    RANDK,
    SIGN,
    loss_of,
    make_batch,
    make_net,
    make_optimizer,
    train,
    unwrapped,
)
from ranks import fingerprint

SEVERAL_MESSAGES = "bucket_cap_mib=0.003"
LAST_STEP = 8


def make_run(me, plan, seed=0):
    model = me.attach(make_net(seed), plan, bucket_cap_mb=0.002)
    return model, make_optimizer(model)


def save(path, model, optimizer):
    parts = {"model": unwrapped(model), "optimizer": optimizer, "cortado": model.cortado}
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def load(path, model, optimizer):
    saved = torch.load(path, weights_only=True)
    unwrapped(model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    model.cortado.load_state_dict(saved["cortado"])


def resume(me, plan, folder, at):
    """The bits of a run without a break, of one that also saved, and of one that a new DDP continued."""
    ends = []
    model, optimizer = make_run(me, plan)
    train(me, model, LAST_STEP, optimizer)
    ends.append(fingerprint(unwrapped(model)))

    model, optimizer = make_run(me, plan)
    train(me, model, range(at), optimizer)
    save(f"{folder}/rank{me.rank}.pt", model, optimizer)
    train(me, model, range(at, LAST_STEP), optimizer)
    ends.append(fingerprint(unwrapped(model)))

    model, optimizer = make_run(me, plan, seed=7)
    load(f"{folder}/rank{me.rank}.pt", model, optimizer)
    train(me, model, range(at, LAST_STEP), optimizer)
    ends.append(fingerprint(unwrapped(model)))
    assert model.cortado.report().to_dict()["messages_per_step"] > 1 or "cap" not in plan
    return ends


@pytest.mark.parametrize(
    "plan, at",
    [
        (f"acp(rank=2, {SEVERAL_MESSAGES})", 0),
        (f"acp(rank=2, {SEVERAL_MESSAGES})", 1),
        (f"acp(rank=2, {SEVERAL_MESSAGES})", 5),
        (f"acp(rank=2, sides=alternate, {SEVERAL_MESSAGES})", 4),
        (f"acp(rank=2, sides=alternate, {SEVERAL_MESSAGES})", 5),
        (f"acp(rank=2, wire=bf16, {SEVERAL_MESSAGES})", 4),
        (f"power(rank=2, {SEVERAL_MESSAGES})", 2),
        (f"power(rank=2, {SEVERAL_MESSAGES})", 5),
        (f"topk(density=0.1, min_elems=0, {SEVERAL_MESSAGES})", 2),
        (f"topk(density=0.1, min_elems=0, {SEVERAL_MESSAGES})", 5),
    ],
)
def test_a_new_ddp_continues_bit_for_bit(pools, tmp_path, plan, at):
    for ends in pools(3).run(resume, plan=plan, folder=str(tmp_path), at=at):
        assert len(set(ends)) == 1


@pytest.mark.parametrize(
    "plan",
    [
        *(PUBLISHED, f"cast(bf16, {SEVERAL_MESSAGES})", "acp(rank=2, rollback=exact)"),
        *(DGC, SIGN, COMPOSED, RANDK, QUANT, FP8, COMPSO, FLOAT_RANS),
    ],
)
def test_other_codecs_continue_bit_for_bit_too(pools, tmp_path, plan):
    for ends in pools(3).run(resume, plan=plan, folder=str(tmp_path), at=3):
        assert len(set(ends)) == 1


def load_to_a_device(me):
    model, optimizer = make_run(me, "topk(density=0.1, min_elems=0)")
    train(me, model, 3, optimizer)
    state = model.cortado.state_dict()
    other, _ = make_run(me, "topk(density=0.1, min_elems=0)")
    train(me, other, 1)
    other.cortado.load_state_dict(on_device(state))
    me._models.clear()
    loaded = other.cortado.state_dict()["tensors"]
    return {name: (tensor["residual"], loaded[name]["residual"]) for name, tensor in state["tensors"].items()}


def test_a_state_that_was_loaded_to_a_device(pools):
    for residuals in pools(2).run(load_to_a_device):
        assert residuals and all(torch.equal(saved, loaded) for saved, loaded in residuals.values())


def save_early(me, plan, folder):
    model, optimizer = make_run(me, plan)
    train(me, model, 4, optimizer)
    save(f"{folder}/rank{me.rank}.pt", model, optimizer)
    return {n: t["basis"].tolist() for n, t in model.cortado.state_dict()["tensors"].items()}


def load_here(me, plan, folder):
    """Loads a state of another world size; returns what was printed, and the state right after."""
    model, optimizer = make_run(me, plan, seed=7)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        load(f"{folder}/rank{me.rank}.pt", model, optimizer)
    state = model.cortado.state_dict()
    train(me, model, range(4, LAST_STEP), optimizer)
    return printed.getvalue(), state


@pytest.mark.parametrize("plan", ["acp(rank=2)", "power(rank=2)", DGC])
def test_another_world_size_keeps_bases_and_step_drops_residuals_and_says_so(pools, tmp_path, plan):
    bases = pools(3).run(save_early, plan=plan, folder=str(tmp_path))[0]
    (printed, state), (printed_by_other, _) = pools(2).run(load_here, plan=plan, folder=str(tmp_path))
    assert "saved by 3 ranks" in printed and "loaded by 2" in printed and "residuals start at zero" in printed
    assert printed_by_other == ""
    assert {name: entry["basis"].tolist() for name, entry in state["tensors"].items()} == bases
    assert not any(entry["residual"].any() or entry["velocity"].any() for entry in state["tensors"].values())
    assert (state["step"], state["phase_step"], state["world_size"]) == (4, 2, 2)


# ---- refused ---------------------------------------------------------------------------------------------------------


def with_wider_layer():
    net = make_net()
    net[0] = torch.nn.Linear(24, 48)
    net[2] = torch.nn.Linear(48, 32)
    return net


def with_other_names():
    return torch.nn.Sequential(torch.nn.Identity(), *make_net())


def change_state(me, state, kind):
    if kind == "rank 0's":  # on rank 0 it fits
        state["rank"] = 0
    elif kind == "another rank's":
        state["rank"] = (me.rank + 1) % me.world_size
    elif kind == "another model's, on one rank" and me.rank == 1:
        state["tensors"]["9.weight"] = state["tensors"].pop("0.weight")
    elif kind == "of no format, on one rank" and me.rank == 1:
        return {"some": "thing"}
    elif kind == "without residuals' names, on one rank" and me.rank == 1:
        del state["tensors"]
    elif kind == "without a residual, on one rank" and me.rank == 1:
        del state["tensors"]["0.weight"]["residual"]
    elif kind == "with a list for a residual, on one rank" and me.rank == 1:
        state["tensors"]["0.weight"]["residual"] = [0.0]
    elif kind == "with a list of tensors, on one rank" and me.rank == 1:
        state["tensors"] = list(state["tensors"])
    elif kind == "of another step, on one rank" and me.rank == 1:
        state["step"] += 1
    elif kind in WRONG_KINDS and me.rank == 1:
        WRONG_KINDS[kind][0](state)
    return state


OTHERS = {
    "a wider model's": (with_wider_layer, "acp(rank=2)"),
    "a renamed model's": (with_other_names, "acp(rank=2)"),
    "another codec's": (make_net, "power(rank=2)"),
    "another matrix rank's": (make_net, "acp(rank=3)"),
}


def first_of(state):
    return state["tensors"]["0.weight"]


# On one rank: how the state is changed, and what is said.
WRONG_KINDS = {
    "without a layout, on one rank": (lambda s: s.update(layout=None), "layout of the state: expected a list"),
    "with a flat layout, on one rank": (lambda s: s.update(layout=["0.weight"]), "layout[0] of the state: expected"),
    "of a negative step, on one rank": (lambda s: s.update(step=-1), "step of the state: expected a number"),
    "of a step in words, on one rank": (lambda s: s.update(phase_step="2"), "phase_step of the state: expected"),
    "of no spec, on one rank": (lambda s: s.update(spec=None), "spec of the state: expected a str"),
    "with a matrix for a residual, on one rank": (
        lambda s: first_of(s).update(residual=first_of(s)["residual"].view(1, -1)),
        '["residual"] of the state: expected floats in one dimension',
    ),
    "with a place of no name, on one rank": (
        lambda s: first_of(s).update(places={"here": first_of(s)["residual"]}),
        "expected a place as NAME@BEGIN, got 'here'",
    ),
}
CHANGED = {
    "another rank's": "each rank loads its own",
    "rank 0's": "this is the state of rank 0, here is rank",
    "another model's, on one rank": '"0.weight"',
    "of no format, on one rank": "cortado.state/1",
    "without residuals' names, on one rank": "tensors",
    "without a residual, on one rank": 'tensors["0.weight"] of the state lacks residual',
    "with a list for a residual, on one rank": '["residual"] of the state: expected a Tensor, got list',
    "with a list of tensors, on one rank": "tensors of the state: expected a dict, got list",
    "of another step, on one rank": "ranks differ",
    **{kind: said for kind, (_, said) in WRONG_KINDS.items()},
}
EXPECTED = {
    "a wider model's": '"0.weight"',
    "a renamed model's": '"0.weight"',
    "another codec's": "power(rank=2)",
    "another matrix rank's": "acp(rank=3)",
    **CHANGED,
}


def refuse(me, kind):
    """The error of loading that state, and whether training went on as if nothing had been loaded."""
    ends, error = [], None
    for tries_to_load in (True, False):
        model, optimizer = make_run(me, "acp(rank=2)")
        train(me, model, 3, optimizer)
        if tries_to_load:
            net, plan = OTHERS.get(kind, (make_net, "acp(rank=2)"))
            other = me.attach(net(), plan)
            train(me, other, 3)
            state = change_state(me, other.cortado.state_dict(), kind)
            with pytest.raises(cortado.MismatchError) as raised:
                model.cortado.load_state_dict(state)
            error = str(raised.value)
        train(me, model, range(3, 6), optimizer)
        ends.append(fingerprint(unwrapped(model)))
    return error, len(set(ends)) == 1


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_state_that_does_not_fit_is_refused_on_every_rank(pools, kind):
    values = pools(3).run(refuse, kind=kind)
    assert all(unchanged for _, unchanged in values)
    errors = [error for error, _ in values]
    if "on one rank" not in kind:
        assert all(EXPECTED[kind] in error for error in errors)
    else:
        assert EXPECTED[kind] in errors[1]
        assert "rank 1" in errors[0] and "rank 1" in errors[2]


def through_dcp(me, folder):
    """torch.distributed.checkpoint, with a name of its own for the state of each rank."""
    plan, name = "topk(density=0.2, min_elems=0, start_step=0)", f"cortado{me.rank}"
    first, second = (me.attach(make_net(seed), plan) for seed in (0, 1))
    train(me, first, 4)
    dcp.save({name: first.cortado.state_dict(), "model": first.module.state_dict()}, checkpoint_id=folder)
    loaded = {name: second.cortado.state_dict(), "model": second.module.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    second.module.load_state_dict(loaded["model"])
    second.cortado.load_state_dict(loaded[name])
    for model in (first, second):
        train(me, model, range(4, 8))
    return fingerprint(first.module) == fingerprint(second.module)


def test_states_go_through_a_distributed_checkpoint(pools, tmp_path):
    assert all(pools(2).run(through_dcp, folder=str(tmp_path)))


def save_before_wait(me):
    """A Reducer's step is under way between backward() and wait(), also where its gradients wait for that, beside
    another one: it goes on as if nobody had asked."""
    ends = []
    for asks, is_shared in [(True, True), (True, False), (False, False)]:
        net = make_net()
        group = dist.new_group()
        plan = "topk(density=0.2, min_elems=0, start_step=0)"
        reducer = cortado.Reducer(net, plan, process_group=group, verbose=False)
        other = cortado.Reducer(make_net(), "none", process_group=group, verbose=False)
        if not is_shared:
            other.close()
        state = reducer.state_dict()
        optimizer = make_optimizer(net)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, make_batch(me.rank, step)).backward()
            if asks:
                with pytest.raises(cortado.CortadoError, match="a step is under way"):
                    reducer.state_dict()
                with pytest.raises(cortado.CortadoError, match="a step is under way"):
                    reducer.load_state_dict(state)
            reducer.wait()
            optimizer.step()
        reducer.close()
        ends.append(fingerprint(net))
    return len(set(ends)) == 1


def test_a_state_can_not_be_taken_within_a_step(pools):
    assert all(pools(2).run(save_before_wait))


def save_inside_a_step(me):
    """Between two backward passes under no_sync a state is that of the last finished step."""
    model, _ = make_run(me, "acp(rank=2)")
    train(me, model, 3)
    before = model.cortado.state_dict()
    with model.no_sync():
        loss_of(model, make_batch(me.rank, 3)).backward()
    after = model.cortado.state_dict()
    return all(torch.equal(before["tensors"][n]["residual"], t["residual"]) for n, t in after["tensors"].items())


def test_a_state_taken_while_accumulating_is_that_of_the_last_step(pools):
    assert all(pools(2).run(save_inside_a_step))


def copy_and_save(me):
    model = me.attach(make_net(), "acp(rank=2)")
    train(me, model, 3)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    assert all(fingerprint(unwrapped(one)) == fingerprint(unwrapped(model)) for one in copies)
    for one in copies:
        with pytest.raises(cortado.CortadoError, match="nothing to report"):
            cortado.report(one)
        for parameter in one.parameters():
            parameter.grad = None
        cortado.attach(one, "acp(rank=2)", verbose=False)
        train(me, one, 3)
        assert cortado.report(one).to_dict()["steps"] == 3
    train(me, model, 3)
    return [fingerprint(unwrapped(one)) for one in copies]


def test_a_copy_of_an_attached_model_is_not_attached_and_can_be(pools):
    first, second = pools(2).run(copy_and_save)
    assert first == second
