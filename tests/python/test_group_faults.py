# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Every kind of collective over Gloo when one rank does not come, gives up, dies or is cut off: the others get an error
that names it, in time."""

import faulthandler
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from cases import repeated
from ranks import Program, free_port, slack_s
from test_ddp_faults import InterruptedGroup
from test_group import FLOAT32, KINDS, Collective

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

import links as shaped

CUT_WAIT_S = 3.0
BROKEN = 2  # the rank; root of broadcasts, so that the others need it in every kind
ROLL_CALL_S = 5
BOTH_WAYS = "all_to_all over a connection each way"


# ---- in a rank -------------------------------------------------------------------------------------------------------


def exchange(group, kind, wait_s):
    """The collective, then a sum: who only sends may end the first one well."""
    import cortado.group

    limit = cortado.group._BOTH_WAYS_BYTES
    if kind == BOTH_WAYS:
        kind, limit = "all_to_all", 0
    root = BROKEN if kind == "broadcast" else 0
    collective = Collective(kind, FLOAT32, root, 1000, False, group.rank, group.world_size)
    with mock.patch.object(cortado.group, "_BOTH_WAYS_BYTES", limit):
        group.start(0, *collective.arguments)
    group.wait(0, wait_s)
    collective.check()
    values = np.ones(10, dtype=np.float32)
    group.start(1, "all_reduce", FLOAT32, values.ctypes.data, values.ctypes.data, 10, 0, None, None)
    group.wait(1, wait_s)


def fails_to_come(me, kind, late_s, wait_s):
    """The broken rank says after ``late_s`` that it has given up; the others return their error and its time."""
    import torch.distributed as dist
    from cortado.group import TorchGroup

    group = TorchGroup(dist.new_group(list(range(me.world_size))))
    group.set_timeout(wait_s)
    if kind == BOTH_WAYS:
        group.connect_both_ways()
        assert group._ways.groups
    if me.rank == BROKEN:
        time.sleep(late_s)
        group.announce("out of coffee")
        return None
    begin = time.monotonic()
    try:
        exchange(group, kind, wait_s)
    except (RuntimeError, TimeoutError) as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("no error")


def stays_away_from_connecting(me):
    import torch.distributed as dist
    from cortado.errors import PeerError
    from cortado.group import TorchGroup

    group = TorchGroup(dist.new_group(list(range(me.world_size))))
    if me.rank == BROKEN:
        group.announce("out of coffee")
        return None
    try:
        group.connect_both_ways()
    except PeerError as error:
        return str(error)
    raise AssertionError("no error")


def asks_without_a_collective(me):
    """A rank that waits for something else asks whether a peer has failed."""
    import torch.distributed as dist
    from cortado.group import TorchGroup

    group = TorchGroup(dist.new_group(list(range(me.world_size))))
    group.check_peers()  # none has
    dist.barrier()
    if me.rank == BROKEN:
        group.announce("out of coffee")
        return None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            group.check_peers()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("no error")


def is_interrupted_behind_a_start(me):
    """What start(), test() and wait() do of a collective that the transport has and whose handle nobody has."""
    import torch.distributed as dist
    from cortado.group import TorchGroup

    group = TorchGroup(dist.new_group(list(range(me.world_size))))
    values = np.ones(10, dtype=np.float32)
    group._group = InterruptedGroup(group._group)
    group.start(0, "all_reduce", FLOAT32, values.ctypes.data, values.ctypes.data, 10, 0, None, None)
    raised = []
    for ask in (lambda: group.test(0), lambda: group.wait(0, 30.0), lambda: group.test(0)):
        try:
            ask()
        except BaseException as error:
            raised.append(type(error).__name__)
    deadline = time.monotonic() + 30
    while values.tolist() != [2.0] * 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    return raised, values.tolist()


def dies(kind, rank, world_size, port):
    import torch.distributed as dist
    from cortado.group import TorchGroup

    faulthandler.dump_traceback_later(45, exit=True)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    group = TorchGroup(None)
    group.set_timeout(20)
    store = dist.distributed_c10d._get_default_store()
    if kind == BOTH_WAYS:
        group.connect_both_ways()
        assert group._ways.groups
    group.all_gather(b"connected", 20)
    store.set(f"connected/{rank}", "")
    if rank == BROKEN:
        store.wait(["connected/0", "connected/1"])
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        exchange(group, kind, 20.0)
    except (RuntimeError, TimeoutError) as error:
        print(json.dumps({"error": str(error), "seconds": time.monotonic() - begin}), flush=True)
    store.set(f"answered/{rank}", "")
    store.wait(["answered/0", "answered/1"])  # the store is in rank 0
    os._exit(0)  # with works in flight that will never end


def is_cut_off():
    """Sums until an error comes, and stays: rank 0 has the rendezvous store."""
    import torch.distributed as dist
    from cortado.group import TorchGroup

    faulthandler.dump_traceback_later(60, exit=True)
    dist.init_process_group("gloo")
    group = TorchGroup(None)
    group.set_timeout(CUT_WAIT_S)
    values = np.ones(1000, dtype=np.float32)
    for work in itertools.count():
        begin = time.monotonic()
        try:
            group.start(work, "all_reduce", FLOAT32, values.ctypes.data, values.ctypes.data, 1000, 0, None, None)
            group.wait(work, CUT_WAIT_S)
        except (RuntimeError, TimeoutError) as error:
            print(json.dumps({"error": str(error), "seconds": time.monotonic() - begin}), flush=True)
            time.sleep(60)
        if work == 0:
            print(json.dumps("running"), flush=True)
        time.sleep(0.01)


# ---- in pytest -------------------------------------------------------------------------------------------------------


def few(kinds):
    return [kind if kind in kinds else repeated(kind) for kind in [*KINDS, BOTH_WAYS]]


def test_a_rank_that_does_not_connect_is_named(pools):
    for message in pools(3).run(stays_away_from_connecting)[:BROKEN]:
        assert "rank 2: out of coffee" in message


def test_failures_are_known_without_a_collective(pools):
    for message in pools(3).run(asks_without_a_collective)[:BROKEN]:
        assert "rank 2: out of coffee" in message


def test_the_end_of_a_collective_is_not_known_where_ctrl_c_came_behind_its_start(pools):
    for raised, values in pools(2).run(is_interrupted_behind_a_start):
        assert raised == ["KeyboardInterrupt"] * 3
        assert values == [2.0] * 10  # it went on


@pytest.mark.parametrize("kind", few(("all_reduce", "all_to_all", "broadcast", BOTH_WAYS)))
@pytest.mark.parametrize("fault, late_s, wait_s", [("gives up", 0.2, 30.0), ("is late", 2.5, 1.0)])
def test_the_others_get_an_error_in_time(pools, kind, fault, late_s, wait_s):
    answers = pools(3).run(fails_to_come, kind=kind, late_s=late_s, wait_s=wait_s)
    for message, seconds in answers[:BROKEN]:
        assert "rank 2: out of coffee" in message
        assert seconds < 2 + ROLL_CALL_S + slack_s()


@pytest.mark.parametrize("kind", few(("all_to_all", "broadcast", BOTH_WAYS)))
def test_a_dead_rank_is_named(kind):
    port = free_port()
    processes = [Program(dies, kind, rank, 3, port) for rank in range(3)]
    try:
        outputs = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank in range(BROKEN):
        out, err = outputs[rank]
        assert out, err[-2000:]
        answer = json.loads(out)
        assert "rank 2 did not answer" in answer["error"]
        assert answer["seconds"] < 2 + ROLL_CALL_S + slack_s()


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("cut", [2, 0])
def test_every_rank_gets_an_error_when_a_link_is_cut(cut):
    with shaped.Links(3) as links:
        places = [(links.environment(rank), links.namespace(rank)) for rank in range(3)]
        ranks = [Program(is_cut_off, environment=variables, namespace=name) for variables, name in places]
        try:
            assert [rank.hear() for rank in ranks] == ["running"] * 3
            time.sleep(0.5)
            links.cut(cut)
            answers = [rank.hear() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, answer in enumerate(answers):
        # Who has lost the store can say no more than that; the others name who is missing.
        alone = "rank 0, or the link to it is gone"
        others = "rank 2 did not answer" if cut == 2 else "rank 1, 2 did not answer"
        assert (alone if (rank == cut) == (cut != 0) else others) in answer["error"], rank
        assert answer["seconds"] < CUT_WAIT_S + ROLL_CALL_S + slack_s()
