# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Where auto runs dense, DDP gets its own exchange back; and auto still watches, and takes it again."""

import copy
import io
import math
import time

import cortado
import pytest
import torch
import torch.distributed as dist
from cortado.ddp import _take_back
from nets import AUTO_STEPS, loss_of, make_batch, make_net, make_optimizer, train, train_until_decided
from ranks import fingerprint

# Nothing here is a hundred times faster than DDP, so it declines. On a busy machine steps of a millisecond may take
# twice as long after a decision: no drift.
DECLINES = "auto(quality=safe, measure_s=0.2, min_gain=0.99, drift=100)"
STEPS = 10


def decline(me, plan=DECLINES, **options):
    """A model that auto has left to DDP."""
    model = me.attach(make_net(), plan, **options)
    has_declined(model.cortado)
    train(me, model, STEPS)
    assert model.cortado.decision()["chosen"] == 0
    assert is_left(model)
    return model


def has_declined(state):
    """As a checkpoint would have it."""
    state.load_state_dict({**state.state_dict(), "spec": "auto, step 5: none"})


def is_left(model):
    """Whether DDP has no hook of ours."""
    return model._comm_hooks == []


def by_ddp_alone(me, like, **options):
    """A model of the same weights that cortado has nothing to do with."""
    model = me.wrap(copy.deepcopy(like.module), **options)
    loss_of(model, make_batch(me.rank, 0)).backward()  # DDP lays out its buckets after the first step
    model.module.load_state_dict(like.module.state_dict())
    return model


def has_the_bits_of_ddp(me, **options):
    model = decline(me, **options)
    other = by_ddp_alone(me, model, **options)
    more = range(STEPS, STEPS + 30)
    losses = [train(me, m, more) for m in (model, other)]
    return losses[0] == losses[1], fingerprint(model.module) == fingerprint(other.module)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.002}])
def test_it_has_the_bits_of_ddp(pools, world_size, options):
    assert pools(world_size).run(has_the_bits_of_ddp, **options) == [(True, True)] * world_size


def accumulates(me):
    model = decline(me)
    other = by_ddp_alone(me, model)
    for m in (model, other):
        optimizer = make_optimizer(m)
        for step in range(20):
            optimizer.zero_grad()
            with m.no_sync():
                loss_of(m, make_batch(me.rank, 3 * step)).backward()
                loss_of(m, make_batch(me.rank, 3 * step + 1)).backward()
            loss_of(m, make_batch(me.rank, 3 * step + 2)).backward()
            optimizer.step()
    made = cortado.report(model).to_dict()["steps"] - STEPS
    saved = model.cortado.state_dict()["spec"]
    assert saved.startswith(f"auto, step {model.cortado._step + 1}: "), "warnings count as the engine does"
    return made, saved, is_left(model), fingerprint(model.module) == fingerprint(other.module)


def test_gradients_may_be_accumulated(pools):
    # The checkpoint that it began with was of step 5.
    assert pools(2).run(accumulates) == [(20, f"auto, step {5 + STEPS + 20}: none", True, True)] * 2


def runs_out_of_memory(me, in_step):
    """A forward pass of one rank raises; it is tried again in micro-batches."""
    model = me.attach(make_net(), DECLINES)
    has_declined(model.cortado)
    optimizer = make_optimizer(model)
    for step in range(40):
        optimizer.zero_grad()
        inputs, labels = make_batch(me.rank, step)
        if step in in_step and me.rank == 1:
            fails = model.module[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(inputs)
            fails.remove()
            with model.no_sync():
                (loss_of(model, (inputs[:2], labels[:2])) / 2).backward()
            (loss_of(model, (inputs[2:], labels[2:])) / 2).backward()
        else:
            loss_of(model, (inputs, labels)).backward()
        optimizer.step()
    report = cortado.report(model).to_dict()
    return is_left(model), report["steps"], report["passed_steps"]


@pytest.mark.parametrize("in_step", [(0,), (1,), (2, 20)])
def test_a_forward_pass_that_raises_is_no_step(pools, in_step):
    assert pools(2).run(runs_out_of_memory, in_step=in_step) == [(True, 40, 39)] * 2


def evaluates(me, rank):
    """On one rank, with gradients: nothing may be sent in a forward pass."""
    model = me.attach(make_net(), DECLINES)
    has_declined(model.cortado)
    optimizer = make_optimizer(model)
    train(me, model, 1, optimizer)  # behind it DDP lays out its buckets, as it always does
    dist.barrier()
    for step in range(1, 40):
        train(me, model, range(step, step + 1), optimizer)
        if me.rank == rank:
            loss_of(model, make_batch(me.rank, step))
            time.sleep(0.2 * (step < 4))
        dist.barrier()
    report = cortado.report(model).to_dict()
    return is_left(model), report["passed_steps"], model.cortado.decision()["step_ns"] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_may_evaluate_with_gradients(pools, rank):
    assert pools(2).run(evaluates, rank=rank) == [(True, 39, True)] * 2  # and steps have been compared meanwhile


def tell(me):
    model = decline(me)
    report = cortado.report(model)
    return report.to_dict(), str(report)


def test_the_report_says_so(pools):
    for report, text in pools(2).run(tell):
        assert report["steps"] == STEPS
        assert report["passed_steps"] == STEPS - 1  # in the first one ranks agree that they owe nothing
        assert report["bytes_per_step"] == report["dense_bytes_per_step"] > 0
        assert f"{report['passed_steps']} steps, dense: exchanged by DDP itself" in text
        assert " by DDP\n" in text
        assert report["hook_stays"] == ""
        assert "  hook  " not in text


def slow_down(me):
    """The network seems to become slower. Behind a checkpoint 16 steps are compared with the 16 before."""
    model = decline(me, "auto(quality=safe, measure_s=0.2, min_gain=0.99)")
    optimizer = make_optimizer(model)
    train(me, model, 15, optimizer)
    for step in range(60):
        time.sleep(0.1)
        train(me, model, range(step, step + 1), optimizer)
        if not is_left(model):
            break
    was_left = is_left(model)
    for step in range(AUTO_STEPS):
        train(me, model, range(step, step + 1), optimizer)
        if model.cortado.decision()["decided"]:
            break
    train(me, model, 3, optimizer)
    return was_left, is_left(model)


def test_it_measures_again_when_steps_become_slower(pools):
    # It is taken from DDP to measure, and given back.
    assert pools(2).run(slow_down) == [(False, True)] * 2


@pytest.mark.parametrize(
    ("attached", "wrapped"),
    [
        ({"check_replicas": 10}, {}),
        ({"check_collectives": True}, {}),
        ({"timeout_s": 100.0}, {}),
        ({}, {"find_unused_parameters": True}),
        ({}, {"static_graph": True}),
    ],
)
def test_it_stays_where_only_it_can_do_what_was_asked_for_and_says_so(pools, attached, wrapped):
    (name,) = [*attached, *wrapped]
    line = f"stays, and DDP does not exchange by itself: {name}"
    for chosen, left, report, text in pools(2).run(stay, attached=attached, wrapped=wrapped):
        assert (chosen, left, report["passed_steps"], report["hook_stays"]) == (0, False, 0, name)
        assert line in text


def stay(me, attached, wrapped):
    model = me.wrap(make_net(), **wrapped)
    state = cortado.attach(model, DECLINES, verbose=False, **attached)
    has_declined(state)
    train(me, model, STEPS)
    report = cortado.report(model)
    return state.decision()["chosen"], is_left(model), report.to_dict(), str(report)


def set_after_attach(me, name):
    """DDP still takes it before the first forward pass."""
    model = me.attach(make_net(), DECLINES)
    has_declined(model.cortado)
    if name == "static_graph":
        model._set_static_graph()
    else:
        model.find_unused_parameters = True
    optimizer = make_optimizer(model)
    prints = set()
    for step in range(6):
        train(me, model, range(step, step + 1), optimizer)
        prints.add(len(set(me.gather(fingerprint(model)))))
    report = cortado.report(model).to_dict()
    return prints, is_left(model), report["passed_steps"], report["hook_stays"]


@pytest.mark.parametrize("name", ["static_graph", "find_unused_parameters"])
def test_it_stays_where_that_is_set_after_attach_and_replicas_stay_equal(pools, name):
    assert pools(2).run(set_after_attach, name=name) == [({1}, False, 0, name)] * 2


def take_back_with_static_graph(me):
    model = me.attach(make_net(), "none")
    model._set_static_graph()
    optimizer = make_optimizer(model)
    train(me, model, 3, optimizer)
    _take_back(model, model.cortado)
    train(me, model, range(3, 6), optimizer)
    return is_left(model)


def test_a_reducer_made_anew_averages_from_its_first_step_with_static_graph(pools):
    assert pools(2).run(take_back_with_static_graph) == [True] * 2


def stay_in_another_group(me):
    group = dist.new_group(list(range(me.world_size)))
    model = me.attach(make_net(), DECLINES, process_group=group)
    has_declined(model.cortado)
    train(me, model, STEPS)
    return is_left(model), cortado.report(model).to_dict()["hook_stays"]


def test_it_stays_in_a_group_that_is_not_the_default_one(pools):
    assert pools(2).run(stay_in_another_group) == [(False, "a process group that is not the default one")] * 2


def copy_it(me):
    model = decline(me)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    more = range(STEPS, STEPS + 10)
    for m in (model, copied, loaded):
        train(me, m, more)
    return len({fingerprint(m.module) for m in (model, copied, loaded)}), cortado.report(model).to_dict()["steps"]


def test_copies_of_the_model_are_ddps_own(pools):
    assert pools(2).run(copy_it) == [(1, STEPS + 10)] * 2


def join(me):
    model = decline(me)
    optimizer = make_optimizer(model)
    with model.join():
        train(me, model, 10 + 5 * me.rank, optimizer)
    train(me, model, 40)
    return is_left(model), cortado.report(model).to_dict()["passed_steps"]


def test_ranks_may_join_with_different_numbers_of_steps(pools):
    # The module isn't told when that has ended: from then on nothing is watched.
    assert pools(2).run(join) == [(True, STEPS - 1)] * 2


def join_after_one_rank_has_evaluated(me):
    model = decline(me)
    if me.rank == 0:
        loss_of(model, make_batch(me.rank, 0))
    with model.join():
        train(me, model, 10)
    return cortado.report(model).to_dict()["passed_steps"]


def test_a_forward_pass_of_one_rank_before_a_join_is_no_step(pools):
    assert pools(2).run(join_after_one_rank_has_evaluated) == [STEPS - 1] * 2


class NoGradient(torch.autograd.Function):
    """What it reads gets no gradient from here."""

    @staticmethod
    def forward(ctx, inputs, parameter):
        return inputs + 0 * parameter.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SometimesUndefined(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(3))
        self.rest = make_net()
        self.is_undefined = False

    def forward(self, x):
        x = NoGradient.apply(x, self.first) if self.is_undefined else x + self.first.sum()
        return self.rest(x)


def undefined_gradients(me):
    model = me.attach(SometimesUndefined(), DECLINES)
    has_declined(model.cortado)
    for step in range(STEPS):
        model.module.is_undefined = me.rank == 1 and step >= STEPS - 4 and step % 2 == 0
        loss_of(model, make_batch(me.rank, step)).backward()
    return is_left(model), cortado.report(model).to_dict()["passed_steps"]


def test_a_step_counts_on_all_ranks_whether_a_gradient_is_defined(pools):
    first, second = pools(2).run(undefined_gradients)
    assert first == second
    assert first[0]


def join_compressed(me):
    """Rank 1 has more data; rank 0 stays behind with old gradients and parameters, which nobody may take for new."""
    net = make_net()
    model = me.wrap(net)
    state = cortado.attach(model, "topk(density=0.2, min_elems=0, start_step=0)", check_replicas=1, verbose=False)
    optimizer = make_optimizer(model)
    with model.join():
        for step in range(4 + 3 * me.rank):
            optimizer.zero_grad()
            loss = loss_of(model, make_batch(me.rank, step))
            (loss * math.inf if step == 5 else loss).backward()
            if step != 5:
                optimizer.step()
    owed = [entry["residual"] for entry in state.state_dict()["tensors"].values()]
    optimizer = make_optimizer(model)  # momenta are those of different steps
    train(me, model, 2, optimizer)
    with torch.no_grad():
        net[0].bias += me.rank
    with pytest.raises(cortado.MismatchError, match=r"0\.bias"):  # replicas are compared again
        train(me, model, 1, optimizer)
    me._models.clear()
    return state.report().to_dict()["non_finite_steps"], max(float(residual.abs().max()) for residual in owed)


def test_ranks_may_join_where_gradients_are_compressed(pools):
    try:
        for non_finite_steps, owed in pools(2).run(join_compressed):
            assert non_finite_steps == 1
            assert owed < 1
    finally:
        pools(2).close()


def begins_with_accumulation(me, set_to_none):
    """DDP gets its exchange back where gradients of other backward passes are there already."""
    ends = []
    for plan in (DECLINES, None):
        model = me.attach(make_net(), plan, gradient_as_bucket_view=True)
        if plan is not None:
            has_declined(model.cortado)
        optimizer = make_optimizer(model)
        for step in range(20):
            optimizer.zero_grad(set_to_none=set_to_none)
            with model.no_sync():
                loss_of(model, make_batch(me.rank, 2 * step)).backward()
            loss_of(model, make_batch(me.rank, 2 * step + 1)).backward()
            optimizer.step()
        assert is_left(model)
        ends.append(fingerprint(model.module))
    return ends[0] == ends[1]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_may_be_there_already(pools, set_to_none):
    assert pools(2).run(begins_with_accumulation, set_to_none=set_to_none) == [True] * 2


def resume(me, spec):
    model = decline(me)
    like = me.attach(make_net(), spec.rpartition(": ")[2])
    train(me, like, 3)
    model.cortado.load_state_dict({**like.cortado.state_dict(), "spec": spec})
    train(me, model, 5)
    decision = model.cortado.decision()
    return decision["decided"], decision["chosen"], is_left(model)


@pytest.mark.parametrize(
    ("spec", "after"),
    [
        ("auto, step 40: none", (True, 0, True)),
        ("auto, step 40: cast(bf16)", (True, 1, False)),
        ("auto, step 9, measuring: none", (False, 0, False)),
    ],
)
def test_another_checkpoint_may_be_loaded_meanwhile(pools, spec, after):
    assert pools(2).run(resume, spec=spec) == [after] * 2


def freeze(me):
    """As a discriminator is while its generator trains."""
    model = me.attach(make_net(), DECLINES)
    has_declined(model.cortado)
    train(me, model, 1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inputs = torch.ones(1, 24, requires_grad=True)
    model(inputs).sum().backward()
    was_left = is_left(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    train(me, model, STEPS)
    return was_left, is_left(model)


def test_parameters_may_be_frozen_for_a_while(pools):
    assert pools(2).run(freeze) == [(False, True)] * 2


def decide(me):
    model = me.attach(make_net(), DECLINES)
    train_until_decided(me, model)
    return model.cortado.decision()["reason"][:5], is_left(model)


def test_from_its_first_step_to_ddps_own(pools):
    assert pools(2).run(decide) == [("dense", True)] * 2


def compiled(me):
    model = me.wrap(make_net())
    state = cortado.attach(model, DECLINES, verbose=False)
    fast = torch.compile(model, backend="eager")
    optimizer = make_optimizer(model)
    has_declined(state)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(fast, make_batch(me.rank, step)).backward()
        optimizer.step()
    return state.decision()["decided"], is_left(model)


def test_a_compiled_model(pools):
    assert pools(2).run(compiled) == [(True, True)] * 2
