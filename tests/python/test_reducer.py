# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""cortado.Reducer: gradients averaged in a training loop of one's own, bit for bit as through DDP."""

import contextlib
import gc
import math
import time

import cortado
import pytest
import torch
import torch.distributed as dist
from cortado import attachment
from late_device import late_device
from nets import (
    CODECS,
    DGC,
    RANDK,
    SIGN,
    TOPK,
    gradients_of,
    local_gradients,
    loss_of,
    make_batch,
    make_net,
    make_optimizer,
    train,
)
from ranks import Pool, fingerprint
from test_ddp_bad_input import error_of
from test_ddp_training import MODELS
from test_plan import MIXED, OTHER

# `none` sums whole buffers, and Gloo's order of additions depends on where in a buffer a value stands: equal to DDP on
# two ranks, where there is only one order.
EQUAL_TO_DDP = [
    *((codec, 3) for codec in CODECS if codec != "none"),
    *[("none", 2), ("acp(rank=2)", 1), (SIGN, 5), pytest.param(MIXED, 4, id="plan")],
]


def reduced(me, net, plan, **options):
    """``net`` with a Reducer in ``.cortado``; replicas are compared when the scenario ends."""
    net.cortado = cortado.Reducer(net, plan, verbose=False, **options)
    me._models.append(net)
    return net


def train_reduced(me, net, steps, optimizer=None):
    """As train()."""
    optimizer = optimizer or make_optimizer(net)
    losses = []
    for step in steps if not isinstance(steps, int) else range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, make_batch(me.rank, step))
        loss.backward()
        net.cortado.wait()
        optimizer.step()
        losses.append(loss.item())
    return losses


def both_ways(me, plan, model=None):
    """The bits a training ends with, through the Reducer and through DDP."""
    make = MODELS[model] if model else make_net
    net = reduced(me, make(), plan)
    train_reduced(me, net, 5)
    through_ddp = me.attach(make(), plan, bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    train(me, through_ddp, 5)
    return fingerprint(net), fingerprint(through_ddp.module)


@pytest.mark.parametrize("codec, world_size", EQUAL_TO_DDP)
def test_gives_the_bits_of_ddp(pools, codec, world_size):
    for reduced_bits, ddp_bits in pools(world_size).run(both_ways, plan=codec):
        assert reduced_bits == ddp_bits


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("codec", ["none", "acp(rank=2, min_compression_rate=0, start_step=1)", TOPK])
def test_gives_the_bits_of_ddp_for_unusual_parameters(pools, codec, model):
    for reduced_bits, ddp_bits in pools(2).run(both_ways, plan=codec, model=model):
        assert reduced_bits == ddp_bits


def switch_plans(me, through_ddp):
    net = make_net()
    model = me.attach(net, MIXED, gradient_as_bucket_view=True) if through_ddp else reduced(me, net, MIXED)
    for steps, plan in ((range(3), OTHER), (range(3, 6), MIXED), (range(6, 8), None)):
        (train if through_ddp else train_reduced)(me, model, steps)
        if plan is not None:
            model.cortado.switch_plan(plan)
    return fingerprint(net)


def test_switches_plans_as_ddp_does(pools):
    assert pools(4).run(switch_plans, through_ddp=False) == pools(4).run(switch_plans, through_ddp=True)


def gradients_by_hand(me):
    """With `none` on three ranks: the mean, in float32."""
    net = reduced(me, make_net(), "none")
    mine = local_gradients(net, make_batch(me.rank, 0))
    loss_of(net, make_batch(me.rank, 0)).backward()
    net.cortado.wait()
    for each in me.gather(gradients_of(net)):
        assert all(torch.equal(each[name], g) for name, g in gradients_of(net).items())
    for name, everybody in ((name, [each[name] for each in me.gather(mine)]) for name in mine):
        torch.testing.assert_close(net.get_parameter(name).grad, sum(everybody) / me.world_size)


def test_none_gives_the_mean(pools):
    pools(3).run(gradients_by_hand)


# ---- what is given ---------------------------------------------------------------------------------------------------


def reduce_parts(me, how):
    net = make_net()
    if how == "named_parameters()":
        given = net.named_parameters()
    elif how == "a list":
        given = [(name, parameter) for name, parameter in net.named_parameters() if name != "0.bias"]
    else:
        net[0].bias.requires_grad_(False)
        given = net
    reducer = cortado.Reducer(given, "acp(rank=2)", verbose=False)
    for step in range(3):
        loss_of(net, make_batch(me.rank, step)).backward()
        reducer.wait()
        names = [name for name, p in net.named_parameters() if p.grad is not None and len(set(me.gather(bits(p)))) == 1]
        net.zero_grad()
    return names, [t["name"] for t in reducer.report().to_dict()["tensors"]]


def bits(parameter):
    return parameter.grad.numpy().tobytes()


@pytest.mark.parametrize("how", ["named_parameters()", "a list", "frozen"])
def test_takes_named_parameters_a_list_or_a_module(pools, how):
    expected = [name for name, _ in make_net().named_parameters() if how == "named_parameters()" or name != "0.bias"]
    for averaged, reported in pools(2).run(reduce_parts, how=how):
        assert averaged == reported == expected


def start_differently(me, init_sync, as_module):
    torch.manual_seed(100 + me.rank)
    channels_last = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # broadcast as a copy
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), channels_last)
    net[0].weight.data.normal_()
    net[0].bias.requires_grad_(False).normal_()
    net[1].running_mean.normal_()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    given = net if as_module else list(net.named_parameters())
    cortado.Reducer(given, "acp(rank=2)", init_sync=init_sync, verbose=False)
    expected = me.gather(before)[0] if init_sync else before
    changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    for name, tensor in net.state_dict().items():
        if name in changed or me.rank == 0:
            assert torch.equal(tensor, expected[name])
    return changed


def test_parameters_start_as_those_of_the_first_rank(pools):
    only_parameters = {"0.weight", "0.bias", "2.weight", "2.bias"}
    everything = only_parameters | {"1.running_mean"}
    assert pools(3).run(start_differently, init_sync=True, as_module=True) == [set(), everything, everything]
    values = pools(3).run(start_differently, init_sync=True, as_module=False)
    assert values == [set(), only_parameters, only_parameters]
    assert pools(3).run(start_differently, init_sync=False, as_module=True) == [set()] * 3


def train_in_groups(me):
    """Ranks 0 and 1 train one model, 1 and 2 another."""
    ends = {}
    for number, ranks in enumerate(([0, 1], [1, 2])):
        group = dist.new_group(ranks)
        if me.rank not in ranks:
            continue
        net = make_net(seed=me.rank)
        net.cortado = cortado.Reducer(net, "acp(rank=2)", process_group=group, verbose=False)
        train_reduced(me, net, 4)
        ends[number] = fingerprint(net)
    return ends


def test_a_group_trains_by_itself(pools):
    (first, both, second) = pools(3).run(train_in_groups)
    assert both == {**first, **second} and both[0] != both[1]


# ---- the backward pass -----------------------------------------------------------------------------------------------


def noting(started, start):
    def start_and_note(work, kind, *arguments):
        started.append(work)
        start(work, kind, *arguments)

    return start_and_note


def watch_starts(me, plan):
    """When collectives were started: [in each backward pass, in each wait()]."""
    group = dist.new_group()  # others may have been attached to the one of the pool
    net = reduced(me, torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4))), plan, process_group=group)
    started, counts = [], []
    group = net.cortado._group
    group.start = noting(started, group.start)
    for _ in range(3):
        net(torch.ones(2, 600)).sum().backward()
        counts.append(len(started))
        started.clear()
        net.cortado.wait()
        assert started == ["used tensors"], "everything else was on its way"
        started.clear()
        net.zero_grad()
    return counts


NO_FUSION = "bucket_cap_mib=0"


@pytest.mark.parametrize("plan", ["none", f"cast(bf16, {NO_FUSION})", f"acp(rank=2, start_step=0, {NO_FUSION})"])
def test_gradients_travel_during_the_backward_pass(pools, plan):
    for counts in pools(2).run(watch_starts, plan=plan):
        assert all(count >= 2 for count in counts)


def accumulate(me, plan, way):
    """Three micro-batches a step; the last under no_sync() too if the way says so."""
    if way == "ddp":
        model = me.attach(make_net(), plan, bucket_cap_mb=0.002, gradient_as_bucket_view=True)
        exchange = model
    else:
        model = reduced(me, make_net(), plan)
        exchange = model.cortado
    optimizer = make_optimizer(model)
    for step in range(4):
        for micro in range(3):
            holds = micro < 2 or way == "wait"
            with exchange.no_sync() if holds else contextlib.nullcontext():
                loss_of(model, make_batch(me.rank, 10 * step + micro)).backward()
        if way != "ddp":
            model.cortado.wait()
        optimizer.step()
        optimizer.zero_grad()
    report = model.cortado.report().to_dict()
    return report["steps"], fingerprint(model.module if way == "ddp" else model)


@pytest.mark.parametrize("codec", ["acp(rank=2)", "power(rank=2)", TOPK, "none"])
def test_accumulated_gradients_are_exchanged_once_as_by_ddp(pools, codec):
    expected = pools(2).run(accumulate, plan=codec, way="ddp")
    assert expected[0][0] == 4
    for way in ("backward", "wait"):
        assert pools(2).run(accumulate, plan=codec, way=way) == expected


class Branches(torch.nn.Module):
    """Parameters that some ranks, all ranks or none use; what is used changes from step to step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always = torch.nn.Linear(24, 24)
        self.on_rank_0 = torch.nn.Linear(24, 24)
        self.in_odd_steps = torch.nn.Linear(24, 24)
        self.never = torch.nn.Linear(24, 24)
        self.head = torch.nn.Linear(24, 8)

    def forward(self, x, rank, step):
        x = self.always(x)
        if rank == 0:
            x = x + self.on_rank_0(x)
        if step % 2:
            x = x + self.in_odd_steps(x)
        return self.head(x)


def train_branches(me, plan, through_ddp):
    """Adam moves what has a gradient, even one of zeros: so None and zeros end differently."""
    if through_ddp:
        options = {"bucket_cap_mb": 0.002, "find_unused_parameters": True, "gradient_as_bucket_view": True}
        model = me.attach(Branches(), plan, **options)
    else:
        model = reduced(me, Branches(), plan)
    net = model.module if through_ddp else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    without = []
    for step in range(6):
        optimizer.zero_grad()
        inputs, labels = make_batch(me.rank, step)
        torch.nn.functional.cross_entropy(model(inputs, me.rank, step), labels).backward()
        if not through_ddp:
            model.cortado.wait()
        without.append({name.split(".")[0] for name, p in net.named_parameters() if p.grad is None})
        optimizer.step()
    return without, fingerprint(net)


@pytest.mark.parametrize(
    "codec", ["acp(rank=2, start_step=1)", "power(rank=2)", TOPK, "none", "cast(bf16)", "acp(rank=2, overlap=off)"]
)
def test_unused_parameters_are_treated_as_by_ddp(pools, codec):
    reduced_values, ddp_values = (pools(2).run(train_branches, plan=codec, through_ddp=ddp) for ddp in (False, True))
    for without, _ in reduced_values:
        assert without == [{"never"} if step % 2 else {"never", "in_odd_steps"} for step in range(6)]
    assert reduced_values == ddp_values


# ---- overflow, clipping, checkpoints ---------------------------------------------------------------------------------


def train_scaled(me, plan, poisoned_step):
    """A loss scaler, and clipping after wait(); one step overflows on the last rank."""
    net = make_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    reduced(me, net, plan, grad_scaler=scaler)
    optimizer = make_optimizer(net)
    norms, scales = [], []
    for step in range(7):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(net, make_batch(me.rank, step)))
        (loss * (math.inf if step == poisoned_step and me.rank == me.world_size - 1 else 1.0)).backward()
        net.cortado.wait()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    report = net.cortado.report().to_dict()
    return norms, scales, report["non_finite_steps"], net.cortado.state_dict()["step"]


@pytest.mark.parametrize("codec", ["acp(rank=2)", TOPK, DGC, RANDK])
def test_an_overflow_on_one_rank_skips_the_step_on_all(pools, codec):
    values = pools(2).run(train_scaled, plan=codec, poisoned_step=3)
    for norms, scales, non_finite_steps, step in values:
        assert [math.isfinite(norm) for norm in norms] == [step != 3 for step in range(7)]
        assert scales[3] == scales[2] / 2
        assert (non_finite_steps, step) == (1, 6)
    assert str(values[0][:2]) == str(values[1][:2]), "all ranks see the same norm"


def resume(me, plan, saved_by_ddp):
    """Trains 6 steps at once, and 3 and 3 with a new Reducer that continues where the first stood."""
    whole = reduced(me, make_net(), plan)
    train_reduced(me, whole, 6, torch.optim.SGD(whole.parameters(), lr=0.05))
    begun = make_net()
    if saved_by_ddp:
        model = me.attach(begun, plan, gradient_as_bucket_view=True)
        train(me, model, 3, torch.optim.SGD(begun.parameters(), lr=0.05))
        state = model.cortado.state_dict()
    else:
        with cortado.Reducer(begun, plan, verbose=False) as reducer:
            begun.cortado = reducer
            train_reduced(me, begun, 3, torch.optim.SGD(begun.parameters(), lr=0.05))
            state = reducer.state_dict()
    resumed = make_net()
    resumed.load_state_dict(begun.state_dict())
    reduced(me, resumed, plan).cortado.load_state_dict(state)
    train_reduced(me, resumed, range(3, 6), torch.optim.SGD(resumed.parameters(), lr=0.05))
    return fingerprint(whole) == fingerprint(resumed)


@pytest.mark.parametrize("codec, saved_by_ddp", [("acp(rank=2)", False), ("acp(rank=2)", True), (DGC, False)])
def test_resumes_to_the_bit_from_its_own_state_and_from_ddps(pools, codec, saved_by_ddp):
    assert pools(2).run(resume, plan=codec, saved_by_ddp=saved_by_ddp) == [True, True]


# ---- one owner -------------------------------------------------------------------------------------------------------


def close_and_drop(me):
    net = make_net()
    first = cortado.Reducer(net, "acp(rank=2)", verbose=False)
    errors = {"twice": error_of(cortado.Reducer, net, "none", verbose=False)}
    part = list(net.named_parameters())[2:3]
    errors["in part"] = error_of(cortado.Reducer, part, "none", verbose=False)
    errors["ddp"] = error_of(cortado.attach, torch.nn.parallel.DistributedDataParallel(net), "acp", verbose=False)
    first.close()
    first.close()
    errors["closed"] = error_of(first.wait)
    loss_of(net, make_batch(me.rank, 0)).backward()
    assert len(set(me.gather(bits(net[0].weight)))) == me.world_size, "nothing is averaged any more"
    net.zero_grad()
    second = cortado.Reducer(net, "acp(rank=2)", verbose=False)
    alive = second._unhook
    del second
    gc.collect()
    assert not alive.alive, "hooks keep no Reducer"
    ddp = me.attach(make_net(), "acp(rank=2)")
    errors["attached"] = error_of(cortado.Reducer, ddp.module, "acp", verbose=False)
    errors["is ddp"] = error_of(cortado.Reducer, ddp, "acp", verbose=False)
    errors["is compiled ddp"] = error_of(cortado.Reducer, torch.compile(ddp), "acp", verbose=False)
    return errors


def test_gradients_are_averaged_by_one_owner(pools):
    for errors in pools(2).run(close_and_drop):
        for what in ("twice", "in part", "attached"):
            assert errors[what][0] == "CortadoError" and 'attached already, with "acp(rank=2' in errors[what][1], what
        assert "a Reducer" in errors["ddp"][1] and "close() it first" in errors["ddp"][1]
        assert "closed" in errors["closed"][1]
        for what in ("is ddp", "is compiled ddp"):
            assert errors[what][0] == "SpecError" and "ddp.module" in errors[what][1], what


def give_wrong_things(me):
    net = make_net()
    hidden = net[0].weight * 2
    given = {
        "without names": net.parameters(),
        "a tensor": net[0].weight,
        "computed": [("hidden", hidden)],
        "same": [("a", net[0].weight), ("b", net[0].weight)],
        "nothing": [],
        "float64": make_net().double(),
        "numbers": [("a", 4)],
        "same name": [("a", net[0].weight), ("a", net[2].weight)],
        "None": None,
    }
    errors = {what: error_of(cortado.Reducer, params, "acp", verbose=False) for what, params in given.items()}
    errors["plan"] = error_of(cortado.Reducer, net, "acp(rnk=2)", verbose=False)
    errors["auto"] = error_of(cortado.Reducer, net, "auto(quality=best)", verbose=False)
    errors["no time"] = error_of(cortado.Reducer, net, "acp", timeout_s=0, verbose=False)
    errors["text"] = error_of(cortado.Reducer, net, "acp", timeout_s="5 s", verbose=False)
    train_reduced(me, reduced(me, net, "acp"), 2)
    return errors


@pytest.mark.parametrize(
    "what, words",
    [
        ("without names", ["model.named_parameters()", "generator"]),
        ("a tensor", ["named tensors", "Parameter"]),
        ("computed", ['"hidden"', "computed"]),
        ("same", ['"b" and "a"', "same tensor"]),
        ("nothing", ["no parameter"]),
        ("float64", ['"0.weight"', "float64", "bfloat16"]),
        ("numbers", ["(str, int)"]),
        ("same name", ['"a"']),
        ("None", ["NoneType"]),
        ("plan", ['no parameter "rnk"']),
        ("auto", ["quality", "balanced", "best"]),
        ("no time", ["timeout_s", "0.001", "got 0"]),
        ("text", ["timeout_s", "seconds", "'5 s'"]),
    ],
)
def test_what_can_not_be_reduced_is_refused(pools, what, words):
    for errors in pools(2).run(give_wrong_things):
        kind, text = errors[what]
        assert kind == "SpecError", text
        assert all(word in text for word in words), text


def differ(me):
    nets = {"settings": make_net(), "models": make_net() if me.rank else make_net()[:2]}
    return {
        "start": error_of(cortado.Reducer, make_net(), "acp(rank=2)", init_sync=me.rank == 0, verbose=False),
        "settings": error_of(cortado.Reducer, nets["settings"], f"acp(rank={2 + me.rank})", verbose=False),
        "models": error_of(cortado.Reducer, nets["models"], "acp(rank=2)", verbose=False),
    }


def test_different_settings_or_models_are_named_on_every_rank(pools):
    for errors in pools(2).run(differ):
        assert errors["settings"][0] == errors["models"][0] == "MismatchError"
        assert errors["start"] == ("MismatchError", "init_sync differs: ranks have True, False")
        assert 'rank 1 has "acp(rank=3' in errors["settings"][1]
        assert "rank 0 has 2 tensors, rank 1 has 8" in errors["models"][1]


# ---- wrong use within a step -----------------------------------------------------------------------------------------


def wait_for_nothing(me):
    net = reduced(me, make_net(), "acp(rank=2)")
    errors = [error_of(net.cortado.wait)]
    train_reduced(me, net, 2)
    errors.append(error_of(net.cortado.wait))
    train_reduced(me, net, 2)
    return errors


def test_wait_without_a_backward_pass_says_so_where_nobody_else_is(pools):
    for kind, text in pools(1).run(wait_for_nothing)[0]:
        assert kind == "CortadoError" and "no backward pass since the last wait()" in text


def wait_without_data(me, plan):
    """Nobody has data in step 0, which is an error; all have in step 1, all but rank 1 have from step 2 on."""
    net = reduced(me, make_net(), plan)
    without, equal, means = [], [], []
    for step in range(4):
        net.zero_grad()
        local = local_gradients(net, make_batch(me.rank, step))
        if step == 1 or (step > 1 and me.rank != 1):
            loss_of(net, make_batch(me.rank, step)).backward()
        else:
            local = {name: torch.zeros_like(gradient) for name, gradient in local.items()}
        error = error_of(net.cortado.wait)
        assert (error is not None) == (step == 0), error
        gradients = gradients_of(net)
        without.append([name for name, gradient in gradients.items() if gradient is None])
        if step:
            equal.append(len(set(me.gather(bits(net[0].weight)))) == 1)
            everybodys = me.gather(local)
            mean = {name: sum(of[name] for of in everybodys) / me.world_size for name in local}
            means.append(all(torch.allclose(gradients[name], mean[name], atol=1e-6) for name in mean))
    return [len(names) for names in without], equal, means


@pytest.mark.parametrize("plan", ["none", TOPK, pytest.param(MIXED, id="plan")])
def test_a_rank_without_a_backward_pass_takes_part_with_zeros(pools, plan):
    world_size = 4 if plan is MIXED else 3
    for without, equal, means in pools(world_size).run(wait_without_data, plan=plan):
        assert without == [len(gradients_of(make_net())), 0, 0, 0]
        assert equal == [True] * 3
        assert means == [True] * 3 or plan != "none"


def misuse(me, what):
    """One rank does something wrong in step 1; returns (first error, error of the call after, seconds)."""
    net = make_net()
    reducer = cortado.Reducer(net, "acp(rank=2, timeout_s=60, bucket_cap_mib=0)", verbose=False)
    optimizer = make_optimizer(net)
    for step in range(3):
        wrong = step == 1 and me.rank == me.world_size - 1
        start = time.monotonic()
        try:
            if wrong and what == "another shape":
                net[2].weight.data = torch.randn(16, 40)
                net[2].bias.data, net[3] = torch.zeros(16), torch.nn.Identity()
                net[4].weight.data = torch.randn(8, 16)
            if wrong and what == "another dtype":
                net.half()
            loss_of(net, make_batch(me.rank, step)).backward()
            if wrong and what == "two backward passes":
                loss_of(net, make_batch(me.rank, step)).backward()
            if wrong and what == "a backward pass under no_sync":
                with reducer.no_sync():
                    loss_of(net, make_batch(me.rank, step)).backward()
            if wrong and what == "zero_grad":
                optimizer.zero_grad()
            if wrong and what == "clipping":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            if wrong and what == "close":
                reducer.close()
            if wrong and what == "raise":
                raise ValueError("out of luck")
            reducer.wait()
        except Exception as error:
            if wrong and what == "raise":
                reducer.close()
            seconds = time.monotonic() - start
            assert attachment.holder_of(net.parameters()) is None, "another Reducer may take them"
            return (type(error).__name__, str(error)), error_of(reducer.wait), seconds
        optimizer.step()
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize(
    "what, kind, words",
    [
        ("two backward passes", "CortadoError", ["got another gradient before wait()", "no_sync()"]),
        ("a backward pass under no_sync", "CortadoError", ["got another gradient before wait()"]),
        ("another shape", "MismatchError", ["4.weight", "(8, 16)", "(8, 32)"]),
        ("another dtype", "MismatchError", ["float16", "float32"]),
        ("zero_grad", "CortadoError", ["changed between backward() and wait()"]),
        ("clipping", "CortadoError", ["changed between backward() and wait()", "clipping"]),
        ("close", "CortadoError", ["closed"]),
        ("raise", "ValueError", ["out of luck"]),
    ],
)
def test_wrong_use_on_one_rank_is_one_clear_error_on_all(what, kind, words):
    pool = Pool(2)  # of its own: the step is broken off
    try:
        (peer, after, seconds), (own, own_after, _) = pool.run(misuse, what=what)
    finally:
        pool.close()
    assert own[0] == kind and all(word in own[1] for word in words), own
    assert peer[0] == "PeerError" and "rank 1" in peer[1], peer
    assert seconds < 20, "not the timeout"
    assert "failed in an earlier step" in after[1]
    assert "failed in an earlier step" in own_after[1] or "closed" in own_after[1]


# ---- two in one backward pass ----------------------------------------------------------------------------------------


def unlike_nets():
    """Of one shape, so that the messages of one fit the other."""
    return [make_net(seed=1), make_net(seed=2)]


def hold_as_others_do(me):
    """Whether a Reducer shares its group: alone, beside another one, once that is closed, and since a DDP was attached
    that one rank has collected."""
    group = dist.new_group()
    net = make_net()
    one = cortado.Reducer(net, "none", process_group=group, verbose=False)
    shares = [one._shares_group]
    with cortado.Reducer(make_net(), "none", process_group=group, verbose=False):
        shares.append(one._shares_group)
    shares.append(one._shares_group)
    gc.disable()
    ddp = torch.nn.parallel.DistributedDataParallel(make_net(), process_group=group)
    cortado.attach(ddp, "none", verbose=False)
    del ddp
    if me.rank == 1:
        gc.collect()
    shares.append(one._shares_group)
    gc.enable()
    one.close()
    return shares


def test_ranks_agree_on_who_shares_a_group(pools):
    assert pools(2).run(hold_as_others_do) == [[False, True, False, True]] * 2


def wait_without_backward(me):
    """Nobody has a backward pass; then all but rank 0, which still has gradients, and nobody uses the last layer."""
    net = reduced(me, make_net(), TOPK)
    train_reduced(me, net, 6)
    loss_of(net, make_batch(me.rank, 6)).backward()
    net.cortado.wait()
    before = {name: gradient.clone() for name, gradient in gradients_of(net).items()}
    error = error_of(net.cortado.wait)
    same = all(torch.equal(gradient, before[name]) for name, gradient in gradients_of(net).items())
    if me.rank != 0:
        net.zero_grad()
        net[0](make_batch(me.rank, 7)[0]).sum().backward()
    net.cortado.wait()
    gradients = gradients_of(net)
    equal = len(set(me.gather(bits(net[0].weight)))) == 1
    return error, same, equal, [name for name, gradient in gradients.items() if gradient is not None]


def test_gradients_of_an_earlier_step_are_no_part_of_one_without_a_backward_pass(pools):
    for error, same, equal, used in pools(3).run(wait_without_backward):
        assert error[0] == "CortadoError" and "no rank had a backward pass" in error[1]
        assert same and equal
        assert set(used) == {"0.weight", "0.bias"}


def two_in_one_pass(me, plans, own_group, late):
    """Bits of both nets after some steps, and of each trained alone."""
    group = dist.new_group() if own_group else None
    with late_device() if late else contextlib.nullcontext():
        nets = unlike_nets()
        first = cortado.Reducer(nets[0], plans[0], verbose=False)
        second = cortado.Reducer(nets[1], plans[1], process_group=group, verbose=False)
        for step in range(3):
            sum(loss_of(net, make_batch(me.rank, step)) for net in nets).backward()
            first.wait()
            second.wait()
            for net in nets:
                make_optimizer(net).step()
                net.zero_grad()
        first.close()
        second.close()
        alone = unlike_nets()
        for net, plan in zip(alone, plans, strict=True):
            with cortado.Reducer(net, plan, verbose=False) as net.cortado:
                for step in range(3):
                    train_reduced(me, net, range(step, step + 1))
            del net.cortado
    return [fingerprint(net) for net in nets], [fingerprint(net) for net in alone]


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize(
    "plans, late",
    [
        (["acp(rank=2)", TOPK], False),
        (["acp(rank=2)", "acp(rank=2)"], True),
        (["auto", "auto"], False),
        (["acp(rank=2)", "auto"], False),
    ],
)
def test_two_in_one_backward_pass(pools, plans, own_group, late):
    for nets, alone in pools(2).run(two_in_one_pass, plans=plans, own_group=own_group, late=late):
        assert nets == alone
    assert nets[0] != nets[1]


def two_with_unused(me, plan, order):
    """Rank 1 does not use one layer of one of two nets; bits of both nets, and of each trained alone."""
    nets = unlike_nets()
    reducers = [cortado.Reducer(net, plan, verbose=False) for net in nets]
    alone = unlike_nets()

    def loss(net, number, step):
        skips = me.rank == 1 and number == 0
        return loss_of(torch.nn.Sequential(*net[:3], *net[4:]) if skips else net, make_batch(me.rank, step))

    for step in range(4):
        sum(loss(net, number, step) for number, net in enumerate(nets)).backward()
        for number in order:
            reducers[number].wait()
        for net in nets:
            make_optimizer(net).step()
            net.zero_grad()
    for reducer in reducers:
        reducer.close()
    for number, net in enumerate(alone):
        with cortado.Reducer(net, plan, verbose=False) as reducer:
            for step in range(4):
                loss(net, number, step).backward()
                reducer.wait()
                make_optimizer(net).step()
                net.zero_grad()
    return [fingerprint(net) for net in nets], [fingerprint(net) for net in alone]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("plan", ["none", "cast(bf16, bucket_cap_mib=0)", "acp(rank=2, bucket_cap_mib=0)", TOPK])
def test_two_in_one_backward_pass_where_a_rank_leaves_one_parameter_unused(pools, plan, order):
    for nets, alone in pools(2).run(two_with_unused, plan=plan, order=order):
        assert nets == alone


def beside_an_attached_model(me, how):
    """A Reducer beside a model of DDP in one backward pass; bits of both, and of each trained alone."""
    nets = unlike_nets()
    if how == "attach":
        model = me.attach(nets[0], "acp(rank=2)")
    else:
        model = me.wrap(nets[0])
        model.register_comm_hook(*cortado.ddp_hook("acp(rank=2)", nets[0], verbose=False))
    reducer = cortado.Reducer(nets[1], "auto", verbose=False)
    group = reducer._group
    started = []
    group.start = noting(started, group.start)
    for step in range(3):
        (loss_of(model, make_batch(me.rank, step)) + loss_of(nets[1], make_batch(me.rank, step))).backward()
        assert not started
        reducer.wait()
        assert started
        started.clear()
        for net in nets:
            make_optimizer(net).step()
            net.zero_grad()
    reducer.close()
    alone = unlike_nets()
    other = me.attach(alone[0], "acp(rank=2)")
    for step in range(3):
        train(me, other, range(step, step + 1))
    del other.cortado
    with cortado.Reducer(alone[1], "auto", verbose=False) as alone[1].cortado:
        for step in range(3):
            train_reduced(me, alone[1], range(step, step + 1))
    return [fingerprint(net) for net in nets], [fingerprint(net) for net in alone]


@pytest.mark.parametrize("how", ["attach", "ddp_hook"])
def test_one_beside_an_attached_model_sends_when_that_has(pools, how):
    for nets, alone in pools(2).run(beside_an_attached_model, how=how):
        assert nets == alone


def misuse_beside_another(me, what):
    """Nothing is sent before wait(), but what is wrong is wrong all the same."""
    other = cortado.Reducer(make_net(), "none", verbose=False)
    net = make_net()
    reducer = cortado.Reducer(net, "acp(rank=2, timeout_s=60)", verbose=False)
    loss_of(net, make_batch(me.rank, 0)).backward()
    start = time.monotonic()
    if me.rank == 1 and what == "close":
        reducer.close()
    if me.rank == 1 and what == "clipping":
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    if me.rank == 1 and what == "drop":
        del reducer
        gc.collect()
        error = None
    elif me.rank == 1 and what == "two backward passes":
        error = error_of(loss_of(net, make_batch(me.rank, 0)).backward)
    else:
        error = error_of(reducer.wait)
    seconds = time.monotonic() - start
    del other
    return error, seconds


@pytest.mark.parametrize("what", ["close", "clipping", "drop", "two backward passes"])
def test_wrong_use_beside_another_is_one_clear_error_on_all(what):
    pool = Pool(2)  # of its own: the step is broken off
    try:
        (peer, seconds), (own, _) = pool.run(misuse_beside_another, what=what)
    finally:
        pool.close()
    assert peer[0] == "PeerError" and "rank 1" in peer[1], peer
    assert seconds < 20, "not the timeout"
    words = {"close": "closed", "clipping": "clipping", "two backward passes": "got another gradient before wait()"}
    assert what == "drop" or words[what] in own[1], own
