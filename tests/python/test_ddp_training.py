# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Plain training through DDP: every codec, world size and kind of parameter; replicas end equal."""

import warnings
from functools import partial

import cortado
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import repeated
from nets import (
    CODECS,
    COMPOSED,
    COMPSO,
    DGC,
    EXACT,
    FLOAT_RANS,
    FP8,
    QUANT,
    RANDK,
    SIGN,
    TOPK,
    OddLayouts,
    distance,
    gradients_of,
    loss_of,
    make_batch,
    make_net,
    make_optimizer,
    mean_residuals,
    train,
    train_anew,
)
from ranks import WORLD_SIZES, fingerprint
from torch.nn.parallel import DistributedDataParallel

STATEFUL = ["acp(rank=2)", "power(rank=2)"]
LOW_RANK = "{}(rank=2, min_compression_rate=0, start_step=1, bucket_cap_mib=0)"


def both_views(me, plan, **options):
    return [train_anew(me, plan, gradient_as_bucket_view=view, **options) for view in (True, False)]


@pytest.mark.parametrize(
    "codec, world_size",
    [
        (codec, world_size) if (i + j) % 2 == 0 else repeated(codec, world_size)
        for i, codec in enumerate(CODECS)
        for j, world_size in enumerate(WORLD_SIZES)
    ],
)
def test_replicas_agree_whether_or_not_gradients_are_views(pools, codec, world_size):
    as_views, as_copies = pools(world_size).run(both_views, plan=codec)[0]
    assert as_views == as_copies


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.002])  # one bucket, several
def test_none_gives_the_bits_of_ddp(pools, world_size, bucket_cap_mb):
    none, ddp = (pools(world_size).run(both_views, plan=p, bucket_cap_mb=bucket_cap_mb) for p in ("none", None))
    assert none == ddp


@pytest.mark.parametrize(
    "codec", ["acp(rank=2)", "power(rank=2)", "cast(fp16, bucket_cap_mib=0)", SIGN, TOPK, RANDK, QUANT, COMPSO]
)
def test_the_same_run_twice_gives_the_same_bits_with_any_number_of_threads(pools, codec):
    expected = pools(2).run(train_anew, plan=codec)
    for plan in (codec, codec.replace(")", ", threads=2)", 1)):
        assert pools(2).run(train_anew, plan=plan) == expected


def learn(me, plan):
    return train(me, me.attach(make_net(), plan), [step % 4 for step in range(60)])


@pytest.mark.parametrize("codec", ["acp(rank=2)", "power(rank=2)", SIGN, TOPK, COMPOSED, QUANT, FP8, COMPSO])
def test_training_gets_as_far_as_without_compression(pools, codec):
    losses, plain = (pools(2).run(learn, plan=plan)[0] for plan in (codec, None))
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert sum(losses[-10:]) < 1.2 * sum(plain[-10:])


def train_with_own_seed(me, plan):
    torch.manual_seed(me.rank)
    torch.randn(me.rank + 1)
    model = me.attach(make_net(seed=me.rank), plan)  # DDP sends rank 0's parameters to the others
    bases = []
    for steps in (range(0), range(3), range(3, 6)):
        train(me, model, steps)
        bases.append({n: t["basis"].tolist() for n, t in model.cortado.state_dict()["tensors"].items()})
    assert bases[0] and all(bases[i] != bases[i + 1] for i in range(2)), "bases should move"
    return bases


@pytest.mark.parametrize("codec", STATEFUL)
def test_ranks_with_different_seeds_have_equal_bases(pools, codec):
    values = pools(3).run(train_with_own_seed, plan=codec)
    assert values[0] == values[1] == values[2]


def train_two_models(me, plans, together):
    models = [me.attach(make_net(seed), plan) for seed, plan in enumerate(plans)]
    optimizers = [make_optimizer(model) for model in models]
    for step in range(6):
        batch = make_batch(me.rank, step)
        if together:
            sum(loss_of(model, batch) for model in models).backward()
        else:
            for model in models:
                loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [fingerprint(model.module) for model in models]


def train_alone(me, plan, seed):
    model = me.attach(make_net(seed), plan)
    train(me, model, 6)
    return fingerprint(model.module)


def train_with_own_random_numbers(me, plan):
    torch.manual_seed(me.rank)
    torch.randn(me.rank + 1)
    model = me.attach(make_net(seed=me.rank), plan)
    train(me, model, 5)
    return fingerprint(model.module)


@pytest.mark.parametrize("codec", [SIGN, TOPK, COMPOSED, RANDK, QUANT, COMPSO])
def test_ranks_with_different_seeds_have_equal_replicas(pools, codec):
    assert len(set(pools(3).run(train_with_own_random_numbers, plan=codec))) == 1


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "plans", [["acp(rank=2)", "power(rank=2, start_step=1)"], [TOPK, "acp(rank=2, start_step=1)"], [SIGN, DGC]]
)
def test_two_models_in_one_process_do_not_disturb_each_other(pools, plans, together):
    pair = pools(3).run(train_two_models, plans=plans, together=together)[0]
    assert pair == [pools(3).run(train_alone, plan=plan, seed=seed)[0] for seed, plan in enumerate(plans)]


class TwoHeads(torch.nn.Module):
    """Trained in turn, each by an optimizer of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(2))

    def forward(self, x, number):
        return self.heads[number](x)


def train_in_turn(me, plan, front_end, way, view):
    net = TwoHeads()
    if front_end == "Reducer":
        model, reducer = net, cortado.Reducer(net, plan, verbose=False)
    else:
        model = DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=view)
        if front_end == "ddp_hook":
            model.register_comm_hook(*cortado.ddp_hook(plan, net, verbose=False))
        else:
            cortado.attach(model, plan, verbose=False)
    no_sync = reducer.no_sync if front_end == "Reducer" else model.no_sync
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.05) for head in net.heads]

    def backward(head, step):
        (model(make_batch(me.rank, step)[0], head) * torch.randn(24)).sum().backward()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(8):
            head = step % 2 if way != "another on rank 1" else (step + me.rank) % 2
            for optimizer in optimizers if way != "each its own" else optimizers[head : head + 1]:
                optimizer.zero_grad(set_to_none=way == "all")
            if way == "accumulated":
                with no_sync():
                    backward(1 - head, step)
            backward(head, step)
            if front_end == "Reducer":
                reducer.wait()
            optimizers[head].step()
    return [str(warning.message) for warning in said if "cortado" in str(warning.message)]


@pytest.mark.parametrize(
    "front_end, view", [("attach", False), ("attach", True), ("ddp_hook", False), ("Reducer", False)]
)
def test_a_gradient_of_an_earlier_step_that_is_exchanged_again_is_told_once(pools, front_end, view):
    how = {"front_end": front_end, "view": view}
    for rank, said in enumerate(pools(2).run(train_in_turn, plan=TOPK, way="each its own", **how)):
        (text,) = said
        assert (
            f"rank {rank}, step " in text and '"heads.' in text and ".weight" in text and "Zero the gradients" in text
        )
    for way in ("all", "zeros", "accumulated", "another on rank 1"):
        assert pools(2).run(train_in_turn, plan=TOPK, way=way, **how) == [[], []], way
    assert pools(2).run(train_in_turn, plan="cast(bf16)", way="each its own", **how) == [[], []]  # nothing is owed


def resume_and_leave_a_gradient(me, plan, front_end):
    """Returns the step that a warning names behind a resume, and the engine's number of it."""

    def made():
        net = TwoHeads()
        if front_end == "Reducer":
            net.state = cortado.Reducer(net, plan, verbose=False)
            return net, net, net.state.wait
        model = DistributedDataParallel(net, find_unused_parameters=True)
        model.state = cortado.attach(model, plan, verbose=False)
        return net, model, lambda: None

    def train_head(made, head, step):
        _, model, wait = made
        (model(make_batch(me.rank, step)[0], head) * torch.randn(24)).sum().backward()
        wait()

    first = made()
    for step in range(5):
        first[0].zero_grad()
        train_head(first, step % 2, step)
    state = first[1].state.state_dict()
    second = made()
    train_head(second, 0, 0)
    second[1].state.load_state_dict(state)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(5):
            if not any("cortado" in str(warning.message) for warning in said):
                second[0].heads[step % 2].zero_grad()
                train_head(second, step % 2, step)
    (text,) = [str(warning.message) for warning in said if "cortado" in str(warning.message)]
    return text.partition("step ")[2].partition(":")[0], str(second[1].state.state_dict()["step"] - 1)


@pytest.mark.parametrize("front_end", ["attach", "Reducer"])
def test_warnings_behind_a_resume_name_the_step_of_the_engine(pools, front_end):
    for said, step in pools(2).run(resume_and_leave_a_gradient, plan=TOPK, front_end=front_end):
        assert said == step and int(step) >= 5


def train_frozen(me, frozen_in):
    """One of two heads is frozen in some steps; returns warnings, and whether ranks have equal gradients."""
    net = TwoHeads()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    cortado.attach(model, TOPK, verbose=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(8):
            net.heads[0].requires_grad_(step not in frozen_in)
            model.zero_grad()
            inputs = make_batch(me.rank, step)[0]
            (model(model(inputs, 0), 1) * torch.randn(24)).sum().backward()
            assert net.heads[0].weight.grad is None or step not in frozen_in
            for parameter in net.parameters():
                if parameter.grad is not None:
                    first, second = me.gather(parameter.grad)
                    assert first.any() and torch.equal(first, second)
    return [str(warning.message) for warning in said if "cortado" in str(warning.message)]


@pytest.mark.parametrize("frozen_in", [range(8), range(4), range(4, 8)])
def test_what_is_frozen_is_not_looked_at_for_what_an_earlier_step_left(pools, frozen_in):
    assert pools(2).run(train_frozen, frozen_in=frozen_in) == [[], []]


def throw_away(me, how):
    """The gradients of a discriminator from its generator's loss."""
    model = me.attach(make_net(), "topk(density=0.2, min_elems=0, start_step=0)")
    train(me, model, 3)
    model.zero_grad()
    before = model.cortado.state_dict()["tensors"]
    inputs = torch.ones(2, 24, requires_grad=True)
    if how == "frozen":
        model.requires_grad_(False)
        model(inputs).sum().backward()
        model.requires_grad_(True)
    elif how == "no_sync":
        with model.no_sync():
            model(inputs).sum().backward()
    else:
        model(inputs).sum().backward()
    model.zero_grad()
    assert inputs.grad is not None
    after = model.cortado.state_dict()["tensors"]
    train(me, model, 2)
    return all(torch.equal(entry["residual"], after[name]["residual"]) for name, entry in before.items())


@pytest.mark.parametrize("how, same", [("frozen", True), ("no_sync", True), ("exchanged", False)])
def test_gradients_that_are_thrown_away_need_not_touch_what_is_owed(pools, how, same):
    assert pools(2).run(throw_away, how=how) == [same] * 2


def stop_and_start(me, plan):
    net = make_net()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    cortado.attach(ddp, "acp(rank=2)", verbose=False)
    optimizer = make_optimizer(net)
    train(me, ddp, 4, optimizer)
    optimizer.zero_grad()
    del ddp
    fresh = make_net()
    fresh.load_state_dict(net.state_dict())
    prints = []
    for model in (net, fresh):
        prints.append(fingerprint(model))
        train(me, me.attach(model, plan), range(4, 8))
        prints.append(fingerprint(model))
    return prints


@pytest.mark.parametrize("plan", [None, "topk(density=0.2, min_elems=0)"])
def test_compression_stops_or_changes_with_a_new_ddp(pools, plan):
    for before, after, before_fresh, after_fresh in pools(2).run(stop_and_start, plan=plan):
        assert before == before_fresh and after == after_fresh != before


def train_in_overlapping_groups(me):
    """Ranks 0 and 1 train one model, 1 and 2 another; a failure is heard in its own group only."""
    members = ([0, 1], [1, 2])
    groups = [dist.new_group(ranks) for ranks in members]
    ends, states = {}, {}
    for number, (group, ranks) in enumerate(zip(groups, members, strict=True)):
        if me.rank not in ranks:
            continue
        model = DistributedDataParallel(make_net(), process_group=group)
        states[number] = cortado.attach(model, "acp(rank=2)", verbose=False)
        train(me, model, 5)
        ends[number] = fingerprint(model.module)
    if me.rank == 2:
        states[1]._group.announce("over")
    me.gather("announced")
    return ends, {number: state._group._board.somebody_failed() for number, state in states.items()}


def test_overlapping_groups_are_told_apart(pools):
    values = pools(3).run(train_in_overlapping_groups)
    (first, *_), (both, heard), (second, _) = values
    assert both == {**first, **second} and both[0] != both[1]
    assert heard == {0: False, 1: True}


# ---- parameters of every kind ----------------------------------------------------------------------------------------


def train_in(me, plan, dtype):
    """Returns the distance to plain DDP's first gradients."""
    gradients = []
    for codec in (plan, None):
        model = me.attach(make_net().to(dtype), codec, bucket_cap_mb=0.002)
        loss_of(model, make_batch(me.rank, 0)).backward()
        gradients.append(gradients_of(model))
        train(me, model, range(1, 5))
    return distance(*gradients)


@pytest.mark.parametrize(
    "codec",
    [
        *("none", "cast(bf16)", "power(rank=64, min_compression_rate=0)", "acp(rank=2, wire=fp16)"),
        *(TOPK, EXACT, QUANT, FP8, COMPSO, FLOAT_RANS),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_averaged(pools, codec, dtype):
    error = max(pools(3).run(train_in, plan=codec, dtype=dtype))
    assert error < (2e-3 if dtype is torch.float16 and "bf16" not in codec else 1e-2)


class TwoDtypes(torch.nn.Module):
    def __init__(self, low=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.low = torch.nn.Linear(24, 40).to(low)
        self.high = torch.nn.Linear(40, 8)

    def forward(self, x):
        return self.high(torch.tanh(self.low(x.to(self.low.weight.dtype))).float())


class HalfAndSingle(TwoDtypes):
    def __init__(self):
        super().__init__(torch.float16)


class Empty(torch.nn.Module):
    """Parameters without elements, alone in their bucket when buckets are small."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.none = torch.nn.Parameter(torch.empty(0))
        self.first = torch.nn.Linear(24, 40)
        self.no_rows = torch.nn.Parameter(torch.empty(0, 40))
        self.no_cols = torch.nn.Parameter(torch.empty(40, 0))
        self.second = torch.nn.Linear(40, 8)

    def forward(self, x):
        x = self.first(x) + self.none.sum()
        return self.second(x + (x @ self.no_rows.t()).sum() + (x @ self.no_cols).sum())


class OnlyVectors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(24))
        self.shift = torch.nn.Parameter(torch.zeros(24))
        self.bias = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return (x * self.scale + self.shift)[:, :8] + self.bias


class Tiny(torch.nn.Module):
    """Fewer elements than workers, in every tensor and (with one tensor a message) in every message."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.full((2, 1), 0.5))
        self.one = torch.nn.Parameter(torch.ones(1, 1))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return (x[:, :2] @ self.matrix @ self.one) * torch.arange(8) + self.scalar * x[:, :8]


MODELS = {m.__name__: m for m in (TwoDtypes, HalfAndSingle, OddLayouts, Empty, OnlyVectors, Tiny)}


def compare_with_ddp(me, plan, view):
    """Distance of what was delivered, and is still owed, to the sum of what plain DDP delivers; for each model."""
    errors = {}
    for name, model in MODELS.items():
        options = {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": view}
        plain, ours = (me.attach(model(), codec, **options) for codec in (None, plan))
        expected, got = ({n: torch.zeros_like(p) for n, p in each.module.named_parameters()} for each in (plain, ours))
        for step in range(3):
            for each, total in ((plain, expected), (ours, got)):
                each.zero_grad()
                loss_of(each, make_batch(me.rank, step)).backward()
                for n, gradient in gradients_of(each).items():
                    total[n] += gradient
                    assert gradient.stride() == dict(plain.module.named_parameters())[n].grad.stride()
        for n, residual in mean_residuals(me, ours).items():
            got[n] = got[n] + residual
        errors[name] = distance(got, expected)
        train(me, ours, 2)
    return errors


@pytest.mark.parametrize(
    "codec, world_size, view",
    [
        ("none", 5, False),
        ("cast(fp16)", 3, True),
        repeated(LOW_RANK.format("acp"), 2, False),
        (LOW_RANK.format("acp"), 3, True),
        repeated(LOW_RANK.format("acp"), 5, False),
        (LOW_RANK.format("power"), 2, True),
        repeated(LOW_RANK.format("power"), 3, False),
        repeated(EXACT, 2, True),
        (EXACT, 5, False),
        ("topk(density=0.3, min_elems=0, start_step=1, bucket_cap_mib=0)", 3, True),
        ("sign(scale=mean_abs, min_elems=0, start_step=0)", 2, False),
        ("randk(density=0.3, min_elems=0, start_step=1, bucket_cap_mib=0)", 3, False),
    ],
)
def test_unusual_parameters_get_the_mean(pools, codec, world_size, view):
    for errors in pools(world_size).run(compare_with_ddp, plan=codec, view=view):
        for model, error in errors.items():
            half = codec == "cast(fp16)" or model == "HalfAndSingle"
            assert error < (1e-2 if model == "TwoDtypes" else 2e-3 if half else 1e-5), model


def compiled(me, order):
    """The weights after some steps of a model that torch.compile has wrapped, in one way or another."""
    compile_it = partial(torch.compile, backend="aot_eager")
    net = make_net()
    if order == "not":
        model = me.wrap(net)
        cortado.attach(model, TOPK, verbose=False)
    elif order == "inside of DDP":
        model = me.wrap(compile_it(net))
        cortado.attach(model, TOPK, verbose=False)
    elif order == "before attach":
        model = compile_it(me.wrap(net))
        cortado.attach(model, TOPK, verbose=False)
    else:
        ddp = me.wrap(net)
        cortado.attach(ddp, TOPK, verbose=False)
        model = compile_it(ddp)
    optimizer = make_optimizer(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, make_batch(me.rank, step)).backward()
        optimizer.step()
    assert cortado.report(model).to_dict()["steps"] == 4
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()


def test_compiled_models_train_alike(pools):
    weights = {
        order: pools(2).run(compiled, order=order)[0]
        for order in ("not", "inside of DDP", "before attach", "after attach")
    }
    for order, got in weights.items():
        np.testing.assert_allclose(got, weights["not"], rtol=1e-5, atol=1e-6, err_msg=order)
