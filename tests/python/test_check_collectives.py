# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Checked collectives: the same bits, and an error where a sum that the process group makes was damaged on its way."""

from unittest import mock

import cortado
import pytest
import torch
from cases import repeated
from cortado.group import TorchGroup
from nets import SIGN, VARYING, make_net, train
from ranks import Pool, fingerprint
from test_ddp_bad_input import error_of
from test_plan import make_plan
from test_reducer import train_reduced

STEPS = 4
FLOAT32 = 0  # codes of the engine
PLAN = make_plan(
    [("all", 3)],
    ("none", "reduce_scatter@all all_gather@all"),
    ("sign", "encode@cpu all_gather@all decode@cpu"),
    ("none", "all_reduce@all"),
)


def name_of(plan):
    return plan if isinstance(plan, str) else "plan"


def run(me, way, plan, check, damaged=False):
    """What it raises, and the parameters in the end; ``damaged``: a bit of what rank 1 sends of a sum is flipped."""
    net = make_net()
    if way == "attach":
        model = torch.nn.parallel.DistributedDataParallel(net)
        cortado.attach(model, plan, check_collectives=check, verbose=False)
    else:
        model = net
        net.cortado = cortado.Reducer(net, plan, check_collectives=check, verbose=False)
    train_it = train if way == "attach" else train_reduced
    train_it(me, model, 2)
    all_reduce, flipped = TorchGroup._all_reduce, []

    def damaging(group, call):
        if me.rank == 1 and damaged and not flipped and call.dtype == torch.float32 and call.elems > 100:
            values = group._tensor(call.sent, call.elems, call.dtype)
            at = values.abs().argmax().item()
            values.view(torch.int32)[at] ^= 1 << 20  # an eighth of it
            flipped.append(at)
        return all_reduce(group, call)

    with mock.patch.object(TorchGroup, "_all_reduce", damaging):
        error = error_of(train_it, me, model, range(2, STEPS))
    return error, fingerprint(net), bool(flipped)


@pytest.mark.parametrize(
    "plan, way",
    [
        (plan, way) if (i + j) % 2 == 0 else repeated(plan, way)
        for i, plan in enumerate(["none", "cast(bf16)", "acp(rank=2)", SIGN, VARYING, PLAN])
        for j, way in enumerate(["attach", "Reducer"])
    ],
    ids=name_of,
)
def test_checks_change_nothing(pools, plan, way):
    for plain, checked in zip(
        pools(3).run(run, way=way, plan=plan, check=False),
        pools(3).run(run, way=way, plan=plan, check=True),
        strict=True,
    ):
        assert plain[0] is None and checked[0] is None
        assert plain[1] == checked[1]


@pytest.mark.parametrize(
    "plan, way",
    [
        ("none", "Reducer"),
        ("acp(rank=2)", "attach"),
        (PLAN, "Reducer"),
        repeated("none", "attach"),
        repeated("acp(rank=2)", "Reducer"),
        repeated(PLAN, "attach"),
    ],
    ids=name_of,
)
def test_a_damaged_sum_ends_training_where_it_is_checked(plan, way):
    undamaged = unchecked = checked = None
    for check, damaged in ((False, False), (False, True), (True, True)):
        pool = Pool(3)  # of its own: the exchange ends
        try:
            values = pool.run(run, way=way, plan=plan, check=check, damaged=damaged)
        finally:
            pool.close()
        assert [value[2] for value in values] == [False, damaged, False]
        if check:
            checked = values
        elif damaged:
            unchecked = values
        else:
            undamaged = values
    for plain, silent, (error, _, _) in zip(undamaged, unchecked, checked, strict=True):
        assert silent[0] is None and silent[1] != plain[1], "without checks nobody hears of it"
        kind, text = error
        assert kind == "CortadoError"
        assert "step 2: " in text and "what one of ranks 0, 1, 2 sent or the result" in text


def ask_wrongly(me, make):
    wrong = error_of(make, "yes")
    different = error_of(make, me.rank == 0)
    return wrong, different, error_of(make, "yes" if me.rank else True)


def reducer(check):
    cortado.Reducer(make_net(), "acp", check_collectives=check, verbose=False)


def kfac(check):
    cortado.KFAC(make_net(), check_collectives=check, verbose=False)


def gather(check):
    cortado.CompressedAllGather([torch.zeros(3)], [0], check_collectives=check)


@pytest.mark.parametrize("make", [reducer, kfac, gather])
def test_what_is_no_choice_or_differs_is_refused(pools, make):
    for rank, (wrong, different, mixed) in enumerate(pools(2).run(ask_wrongly, make=make)):
        assert wrong == ("SpecError", "check_collectives is True or False; got 'yes'")
        assert different == ("MismatchError", "check_collectives differs: ranks have True, False")
        assert mixed == (wrong if rank else ("MismatchError", "check_collectives differs: ranks have True, neither"))


def second_order(me, check, damaged=""):
    """Two steps of K-FAC and a gather. ``damaged``: of what rank 1 sends in the second a bit is flipped, of a sum of
    factors, of a payload of K-FAC's or of the gather's."""
    net = make_net()
    preconditioner = cortado.KFAC(
        net, strategy="mem-opt", compression="quant(bits=8)", check_collectives=check, verbose=False
    )
    tensors = [torch.full((300,), 1.0 + me.rank), torch.full((200,), 2.0 + me.rank)]
    gather = cortado.CompressedAllGather(tensors, [0, 1], "quant(bits=8)", check_collectives=check)
    inside, flipped = [], []

    def step():
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(torch.randn(4, 24)), torch.tensor([0, 1, 2, 3])).backward()
        inside[:] = ["factors", "payloads"]
        preconditioner.step()
        inside[:] = ["gather"]
        gather(tensors)

    torch.manual_seed(me.rank)
    step()
    start = TorchGroup.start

    def damaging(group, work, kind, dtype, sent, received, elems, root, counts, received_counts):
        is_sum = kind in ("all_reduce", "reduce_scatter", "reduce")
        of_kind = is_sum == (damaged == "factors") and (dtype == FLOAT32) == is_sum
        total = (sum(counts) if kind == "reduce_scatter" else counts[group.rank]) if counts else elems
        if me.rank == 1 and damaged in inside and not flipped and of_kind and total > 64:
            code = torch.float32 if is_sum else torch.uint8
            values = group._tensor(sent, total, code)
            values.view(torch.uint8)[values.abs().argmax().item() * code.itemsize + (2 if is_sum else 0)] ^= 16
            flipped.append(kind)
        return start(group, work, kind, dtype, sent, received, elems, root, counts, received_counts)

    with mock.patch.object(TorchGroup, "start", damaging):
        error = error_of(step)
    sums = [parameter.grad.double().sum().item() for parameter in net.parameters()]
    return error, sums + [tensor.double().sum().item() for tensor in tensors], bool(flipped)


def test_checks_change_nothing_of_second_order(pools):
    plain, checked = (pools(2).run(second_order, check=check) for check in (False, True))
    for one, other in zip(plain, checked, strict=True):
        assert one[0] is None and other[0] is None
        assert one[1] == other[1]


@pytest.mark.parametrize("damaged", ["factors", "payloads", "gather"])
def test_damage_ends_second_order_on_every_rank(damaged):
    pool = Pool(2)  # of its own: the exchange ends
    try:
        values = pool.run(second_order, check=True, damaged=damaged)
    finally:
        pool.close()
    assert values[1][2], "something was damaged"
    errors = [error for error, _, _ in values]
    assert all(errors), "also where it came as it was sent"
    said = "what one of ranks 0, 1 sent" if damaged == "factors" else "what rank 1 sent was damaged or cut on its way"
    assert any(said in text for _, text in errors)
