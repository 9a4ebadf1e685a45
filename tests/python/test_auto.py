# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""plan="auto": it decides on all ranks alike, says so, goes on training, and can be saved."""

import itertools

import cortado
import pytest
import torch
from cases import repeated
from nets import AUTO_STEPS, distance, loss_of, make_batch, make_net, make_optimizer, train, train_until_decided
from ranks import RanksFailed

# On a busy machine steps of a millisecond may take twice as long after a decision: no drift.
QUICK = "auto(measure_s=0.3, drift=100)"


def decide(me, plan=QUICK, **options):
    model = me.attach(make_net(), plan, **options)
    losses = train_until_decided(me, model)
    decision = model.cortado.decision()
    report = cortado.report(model)
    return decision, losses, report.to_dict(), str(report)


@pytest.mark.parametrize(
    "options, world_size",
    [
        ({}, 3),
        ({"gradient_as_bucket_view": True}, 2),
        ({"bucket_cap_mb": 0.002}, 3),
        repeated({}, 2),
        repeated({"gradient_as_bucket_view": True}, 3),
        repeated({"bucket_cap_mb": 0.002}, 2),
    ],
)
def test_all_ranks_decide_alike_and_go_on(pools, options, world_size):
    answers = pools(world_size).run(decide, **options)
    decisions = [answer[0] for answer in answers]
    assert all(decision["decided"] for decision in decisions)
    assert all(decision["reason"] == decisions[0]["reason"] for decision in decisions)
    assert all(decision["candidates"] == decisions[0]["candidates"] for decision in decisions)
    dense = decisions[0]["candidates"][0]
    assert dense["label"] == "dense"
    assert dense["measured_ns"] > 0
    assert dense["predicted_ns"] > 0
    for candidate in decisions[0]["candidates"][1:]:
        is_known = candidate["measured_ns"] is not None and candidate["predicted_ns"] is not None
        assert (candidate["simulated_ns"] is not None) == is_known
        assert (candidate["trials_ns"] == []) == (candidate["measured_ns"] is None)
        assert (candidate["pace"] is not None) == (candidate["predicted_at_pace_ns"] is not None)
        assert candidate["pace"] is None or is_known  # and it is not where one of two paces is far off
    losses = answers[0][1]
    assert sum(losses[-10:]) < sum(losses[:10])
    assert answers[0][2]["auto"]["reason"] == decisions[0]["reason"]
    assert answers[0][2]["spec"].startswith("auto(quality=balanced): ")
    assert decisions[0]["reason"] in answers[0][3]
    told = next(line for line in answers[0][3].splitlines() if line.startswith("  a step          predicted "))
    pace = decisions[0]["candidates"][decisions[0]["chosen"]]["pace"]
    assert (" at the machine's speed then)" in told) == (pace is not None and abs(pace - 1) > 0.03)


def announced(me, verbose):
    model = me.wrap(make_net())
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as said:
        state = cortado.attach(model, QUICK, verbose=verbose)
        train_until_decided(me, model, state)
    return said.getvalue()


def test_rank_0_says_what_it_does(pools):
    said = pools(2).run(announced, verbose=True)
    first, *rest = said[0].splitlines()
    assert first.startswith(
        "cortado: auto(quality=balanced) over callback(gloo), world size 2: dense for the first 9 to"
    )
    assert "may use none, cast(bf16), cast(fp16)" in first
    assert any(line.startswith("cortado: auto, step ") for line in rest)
    assert said[1] == ""
    assert pools(2).run(announced, verbose=False) == ["", ""]


def default_plan(me):
    model = me.wrap(make_net())
    state = cortado.attach(model, verbose=False)
    train(me, model, 2)
    return state.spec


def test_auto_is_the_default(pools):
    assert pools(2).run(default_plan) == ["auto(quality=balanced): measuring, dense"] * 2


def dense_bits(me, plan):
    from ranks import fingerprint

    model = me.attach(make_net(), plan)
    train(me, model, 4)
    return fingerprint(model)


def test_measuring_steps_are_those_of_ddp(pools):
    assert pools(2).run(dense_bits, plan="auto") == pools(2).run(dense_bits, plan=None)


def near_ddp(me):
    """Trials of casts change next to nothing, and what they owe is paid."""
    by_auto = me.attach(make_net(), "auto(quality=safe, measure_s=0.2)")
    losses = train_until_decided(me, by_auto)
    by_ddp = me.wrap(make_net())
    train(me, by_ddp, len(losses))
    return distance(*(dict(m.module.state_dict()) for m in (by_auto, by_ddp)))


def test_safe_stays_near_ddp(pools):
    assert max(pools(2).run(near_ddp)) < 0.05


def reduce(me):
    net = make_net()
    reducer = cortado.Reducer(net, QUICK, verbose=False)
    optimizer = make_optimizer(net)
    for step in range(AUTO_STEPS):
        optimizer.zero_grad()
        loss_of(net, make_batch(me.rank, step)).backward()
        reducer.wait()
        optimizer.step()
        if reducer.decision()["decided"]:
            break
    me._models.append(net)
    decision = reducer.decision()
    reducer.close()
    return decision["decided"], decision["reason"]


def test_a_reducer_can_be_automatic(pools):
    answers = pools(2).run(reduce)
    assert answers[0][0]
    assert answers[0] == answers[1]


def resume(me):
    model = me.attach(make_net(), QUICK)
    steps = len(train_until_decided(me, model))
    saved = model.cortado.state_dict()
    weights = {key: value.clone() for key, value in model.module.state_dict().items()}
    again = me.wrap(make_net())
    again.module.load_state_dict(weights)
    state = cortado.attach(again, QUICK, verbose=False)
    state.load_state_dict(saved)
    before, after = model.cortado.decision(), state.decision()
    train(me, again, range(steps, steps + 5))
    label = before["candidates"][before["chosen"]]["label"]
    return label, after["candidates"][after["chosen"]]["label"], after["reason"]


def test_a_checkpoint_keeps_the_decision(pools):
    for before, after, reason in pools(2).run(resume):
        assert before == after
        assert reason.endswith("as in the checkpoint")


def alone(me):
    model = me.attach(make_net(), "auto")
    train(me, model, 3)
    return model.cortado.decision()["reason"]


def test_one_rank(pools):
    assert pools(1).run(alone) == ["one rank: there is nothing to exchange"]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("auto(quality=best)", 'quality must be safe, balanced or aggressive, got "best"'),
        ("auto(speed=1)", 'no parameter "speed"; auto takes quality'),
        ("auto | quant", "expected auto or auto(quality=...) alone"),
        ("auto(cluster=/no/such/file.json)", "/no/such/file.json"),
    ],
)
def test_bad_input(pools, plan, text):
    with pytest.raises(RanksFailed) as raised:
        pools(2).run(decide, plan=plan)
    assert str(raised.value).count(text) >= 2  # on both ranks


def overflowing(me):
    """Inf on one rank while it measures and tries: every rank sees it, and training goes on afterwards."""
    model = me.attach(make_net(), QUICK)
    optimizer = make_optimizer(model)
    last = AUTO_STEPS
    for step in itertools.count():
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(me.rank, step))
        overflows = step % 7 == 3
        if overflows and me.rank == 0:
            loss = loss * float("inf")
        loss.backward()
        finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
        assert finite != overflows, step
        if finite:
            optimizer.step()
        if model.cortado.decision()["decided"]:
            last = min(last, step + 15)  # two of them overflow
        if step == last:
            return model.cortado.decision()["decided"]


def test_overflows_while_it_measures(pools):
    assert pools(2).run(overflowing) == [True, True]
