# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Replicas that have come apart are found on request, and the first parameter and the step are named on every rank."""

import cortado
import pytest
import torch
from nets import make_net, train
from ranks import Pool
from test_ddp_bad_input import error_of
from test_reducer import train_reduced

NAME = "2.weight"


def flip_one_bit(net, bit=0):
    net.get_parameter(NAME).data.view(torch.int32).view(-1)[100] ^= 1 << bit


def check_by_hand(me, way):
    net = make_net()
    net.register_parameter("frozen", torch.nn.Parameter(torch.ones(3), requires_grad=False))
    if way == "attach":
        model = torch.nn.parallel.DistributedDataParallel(net)
        state = cortado.attach(model, "acp(rank=2)", verbose=False)
        train(me, model, 3)
    else:
        state = net.cortado = cortado.Reducer(net, "acp(rank=2)", verbose=False)
        train_reduced(me, net, 3)
    state.check_replicas()
    state.check_replicas(net)
    errors = []
    if me.rank == 1:
        flip_one_bit(net)
    errors.append(error_of(state.check_replicas))
    errors.append(error_of(state.check_replicas, net))
    if me.rank == 1:
        flip_one_bit(net)
        net.frozen += 1
    state.check_replicas()
    errors.append(error_of(state.check_replicas, net))
    return errors


@pytest.mark.parametrize("way", ["attach", "Reducer"])
def test_one_bit_on_one_rank_is_found_and_named(pools, way):
    for of_exchanged, of_model, of_frozen in pools(3).run(check_by_hand, way=way):
        for kind, text in (of_exchanged, of_model):
            assert kind == "MismatchError"
            assert text == (
                f'before step 3 replicas differ: "{NAME}" of rank 1 is not that of rank 0; all were equal before step 3'
            )
        assert '"frozen" of rank 1' in of_frozen[1], "parameters without gradients are compared too"


def check_every_so_often(me, way, interval):
    """The bit flips after step 3; returns the step whose exchange raised, and the error."""
    net = make_net()
    if way == "attach":
        model = torch.nn.parallel.DistributedDataParallel(net)
        cortado.attach(model, "acp(rank=2)", check_replicas=interval, verbose=False)
    else:
        model, net.cortado = net, cortado.Reducer(net, "acp(rank=2)", check_replicas=interval, verbose=False)
    for step in range(8):
        error = error_of(train if way == "attach" else train_reduced, me, model, range(step, step + 1))
        if error is not None:
            return step, error
        if step == 3 and me.rank == 0:
            flip_one_bit(net, bit=20)  # the lowest might be rounded away again
    return None


@pytest.mark.parametrize("way", ["attach", "Reducer"])
@pytest.mark.parametrize("interval, found_at", [(1, 4), (3, 6), (0, None)])
def test_every_so_many_steps_as_asked(way, interval, found_at):
    pool = Pool(2)  # of its own: the step is broken off
    try:
        values = pool.run(check_every_so_often, way=way, interval=interval)
    finally:
        pool.close()
    for value in values:
        if found_at is None:
            assert value is None
            continue
        step, (kind, text) = value
        assert (step, kind) == (found_at, "MismatchError")
        assert f'before step {found_at} replicas differ: "{NAME}" of rank 1 is not that of rank 0' in text
        assert f"all were equal before step {found_at - interval}" in text


def ask_wrongly(me):
    errors = [error_of(cortado.Reducer, make_net(), "acp", check_replicas=n, verbose=False) for n in (-1, "often")]
    return errors + [error_of(cortado.Reducer, make_net(), "acp", check_replicas=5 + me.rank, verbose=False)]


def test_an_interval_that_is_none_or_differs_is_refused(pools):
    for negative, text, different in pools(2).run(ask_wrongly):
        assert negative[0] == text[0] == "SpecError" and "-1" in negative[1] and "'often'" in text[1]
        assert different == ("MismatchError", "check_replicas differs: ranks have 5, 6")
