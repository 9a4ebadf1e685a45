# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Checked collectives: the same bits, and an error where a sum that the process group makes was damaged on its way."""

from unittest import mock

import cortado
import pytest
import torch
from cortado.group import TorchGroup
from nets import SIGN, VARYING, make_net, train
from ranks import Pool, fingerprint
from test_ddp_bad_input import error_of
from test_plan import make_plan
from test_reducer import train_reduced

STEPS = 4
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
        state = cortado.attach(model, plan, check_collectives=check, verbose=False)
    else:
        model = net
        state = net.cortado = cortado.Reducer(net, plan, check_collectives=check, verbose=False)
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
    return error, fingerprint(net), state.report().to_dict()["communicator"], bool(flipped)


@pytest.mark.parametrize("way", ["attach", "Reducer"])
@pytest.mark.parametrize("plan", ["none", "cast(bf16)", "acp(rank=2)", SIGN, VARYING, PLAN], ids=name_of)
def test_checks_change_nothing(pools, way, plan):
    for plain, checked in zip(
        pools(3).run(run, way=way, plan=plan, check=False),
        pools(3).run(run, way=way, plan=plan, check=True),
        strict=True,
    ):
        assert plain[0] is None and checked[0] is None
        assert plain[1] == checked[1]
        assert (plain[2], checked[2]) == ("callback(gloo)", "checking(callback(gloo))")


@pytest.mark.parametrize("way", ["attach", "Reducer"])
@pytest.mark.parametrize("plan", ["none", "acp(rank=2)", PLAN], ids=name_of)
def test_a_damaged_sum_ends_training_where_it_is_checked(way, plan):
    undamaged = unchecked = checked = None
    for check, damaged in ((False, False), (False, True), (True, True)):
        pool = Pool(3)  # of its own: the exchange ends
        try:
            values = pool.run(run, way=way, plan=plan, check=check, damaged=damaged)
        finally:
            pool.close()
        assert [value[3] for value in values] == [False, damaged, False]
        if check:
            checked = values
        elif damaged:
            unchecked = values
        else:
            undamaged = values
    for plain, silent, (error, _, _, _) in zip(undamaged, unchecked, checked, strict=True):
        assert silent[0] is None and silent[1] != plain[1], "without checks nobody hears of it"
        kind, text = error
        assert kind == "CortadoError"
        assert "step 2: " in text and "what one of ranks 0, 1, 2 sent or the result" in text


def ask_wrongly(me):
    different = error_of(cortado.Reducer, make_net(), "acp", check_collectives=me.rank == 0, verbose=False)
    return error_of(cortado.Reducer, make_net(), "acp", check_collectives="yes", verbose=False), different


def test_what_is_no_choice_or_differs_is_refused(pools):
    for wrong, different in pools(2).run(ask_wrongly):
        assert wrong == ("SpecError", "check_collectives is True or False; got 'yes'")
        assert different == ("MismatchError", "check_collectives differs: ranks have True, False")
