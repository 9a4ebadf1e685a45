# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Every kind of collective of the callback communicator over torch.distributed with Gloo, in processes."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from ranks import Pool

KINDS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather"]
ROOTED = {"broadcast", "reduce", "gather"}
ONE_BLOCK = {"all_reduce", "broadcast", "reduce"}
FLOAT32, BFLOAT16, UINT8 = 0, 2, 3


# ---- in a rank -------------------------------------------------------------------------------------------------------


def bits(values, dtype):
    """Small integers as the memory of that dtype."""
    values = np.asarray(values, dtype=np.float32)
    if dtype == UINT8:
        return values.astype(np.uint8)
    if dtype == BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values


def sent_by(rank, elems):
    return np.array([(7 * rank + 3 * k) % 4 for k in range(elems)])


class Collective:
    """One collective of this rank, with what it must bring."""

    def __init__(self, kind, dtype, root, counts, in_place, rank, world_size):
        """``counts[from][to]``; of the other kinds than all_to_all only row 0 is looked at; a number: equal blocks."""
        varying = not isinstance(counts, int)
        table = np.asarray(counts) if varying else np.full((world_size, world_size), counts)
        row = table[rank] if kind == "all_to_all" else table[0]
        blocks = {source: sent_by(source, self._sent_elems(kind, table, source)) for source in range(world_size)}
        everything = [blocks[source] for source in range(world_size)]
        if kind == "broadcast":
            expected = blocks[root]
        elif kind in ("all_reduce", "reduce"):
            expected = np.sum(everything, axis=0)
        elif kind == "reduce_scatter":
            begin = row[:rank].sum()
            expected = np.sum(everything, axis=0)[begin : begin + row[rank]]
        elif kind == "all_to_all":
            begins = [table[source][:rank].sum() for source in range(world_size)]
            expected = np.concatenate([blocks[s][begins[s] : begins[s] + table[s][rank]] for s in range(world_size)])
        else:
            expected = np.concatenate(everything)
        self.writes = kind not in ROOTED or (rank == root) != (kind == "broadcast")
        self.expected = bits(expected, dtype)
        self.received = np.full_like(self.expected, 77)
        self.sent = bits(blocks[rank], dtype)
        self.before = self.sent.copy()
        if in_place and kind not in ("reduce_scatter", "all_to_all"):
            begin = row[:rank].sum() if kind in ("all_gather", "gather") else 0
            own = self.received[begin : begin + len(self.sent)]
            own[:] = self.sent
            self.sent = own
        self.arguments = (
            kind,
            dtype,
            self.sent.ctypes.data,
            self.received.ctypes.data,
            0 if varying else counts,
            root,
            [int(count) for count in row] if varying else None,
            [int(count) for count in table[:, rank]] if varying and kind == "all_to_all" else None,
        )

    @staticmethod
    def _sent_elems(kind, table, source):
        if kind in ("reduce_scatter", "all_to_all"):
            return table[source if kind == "all_to_all" else 0].sum()
        return table[0][source]

    def check(self):
        assert not self.writes or np.array_equal(self.received, self.expected), self.arguments
        assert self.writes or np.array_equal(self.sent, self.before), self.arguments


def collectives(rank, world_size):
    varying = [
        [0 if (s + t) % 3 == 1 else (5 * s + 3 * t) % 900 + 1 for t in range(world_size)] for s in range(world_size)
    ]
    for kind, dtype, in_place in itertools.product(KINDS, [FLOAT32, BFLOAT16, UINT8], [False, True]):
        for root in range(world_size) if kind in ROOTED else [0]:
            for counts in [0, 1, 700] if kind in ONE_BLOCK else [0, 1, 700, varying]:
                yield Collective(kind, dtype, root, counts, in_place, rank, world_size)


def run_all(group):
    """Several in flight at once, their ends looked at in both ways."""
    flying = []
    for work, collective in enumerate(collectives(group.rank, group.world_size)):
        group.start(work, *collective.arguments)
        flying.append((work, collective))
        if len(flying) == 8:
            land(group, *flying.pop(0))
    for work, collective in flying:
        land(group, work, collective)


def land(group, work, collective):
    if work % 2:
        while not group.test(work):
            time.sleep(0.0005)
    else:
        group.wait(work, 30.0)
    collective.check()
    assert group.test(work)  # of what has ended both may be asked again
    group.wait(work, 30.0)


def every_kind(me):
    from cortado.group import TorchGroup

    run_all(TorchGroup(None))


@contextlib.contextmanager
def own_group(me):
    """One that nothing is known of yet."""
    import cortado.group
    import torch.distributed as dist

    process_group = dist.new_group(list(range(me.world_size)))
    try:
        yield cortado.group.TorchGroup(process_group)
    finally:
        dist.destroy_process_group(process_group)


class Recorded:
    """A process group, and what it was asked for: roots of broadcasts, counts of exchanges."""

    def __init__(self, group):
        self.group, self.roots, self.counts = group, set(), []

    def broadcast(self, tensors, options):
        self.roots.add(options.rootRank)
        return self.group.broadcast(tensors, options)

    def alltoall_base(self, received, sent, received_counts, sent_counts, options):
        self.counts.append((received_counts, sent_counts))
        return self.group.alltoall_base(received, sent, received_counts, sent_counts, options)


def every_kind_over_a_connection_each_way(me):
    import cortado.group

    with own_group(me) as group, mock.patch.object(cortado.group, "_BOTH_WAYS_BYTES", -1):
        group.connect_both_ways()
        up, down = group._ways.groups = [Recorded(way) for way in group._ways.groups]
        run_all(group)
    assert [up.roots, down.roots] == ([{0}, {1}] if me.world_size == 2 else [set(), set()])
    assert up.counts and len(up.counts) == len(down.counts)
    for received, sent in up.counts:
        assert not any(received[me.rank :]) and not any(sent[: me.rank + 1])
    for received, sent in down.counts:
        assert not any(received[: me.rank + 1]) and not any(sent[me.rank :])
    for way, senders in ((up, range(me.rank)), (down, range(me.rank + 1, me.world_size))):
        assert not senders or any(any(received) for received, _ in way.counts)


def every_kind_where_a_connection_fails(me, way):
    """On the last rank, where others wait for it."""
    import cortado.group

    is_last = me.rank == me.world_size - 1

    def refuse(which, timeout):
        if which == way:
            raise RuntimeError("too many open files")
        return connect(which, timeout)

    with own_group(me) as group, mock.patch.object(cortado.group, "_BOTH_WAYS_BYTES", -1):
        connect = group._connect
        if is_last:
            group._connect = refuse
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            group.connect_both_ways(12.0)
        assert group._ways is None
        assert any("too many open files" in str(warning.message) for warning in warned) == is_last
        run_all(group)


def large_blocks_use_both_ways(me):
    """By the size of blocks, which all ranks know; a plan's all-to-all may have blocks of any size."""
    import cortado.group

    limit = cortado.group._BOTH_WAYS_BYTES
    both = []
    with own_group(me) as group:
        for kind, counts in [
            ("all_gather", limit),
            ("all_gather", limit + 1),
            ("all_to_all", limit),
            ("all_to_all", limit + 1),
            ("all_to_all", [[0, 1], [1, 0]]),
            ("reduce_scatter", limit),
            ("reduce_scatter", [[1, limit + 1]] * 2),
            ("all_gather", [[1, limit + 1]] * 2),
        ]:
            group.connect_both_ways()
            before = group._ways.started
            collective = Collective(kind, UINT8, 0, counts, False, group.rank, group.world_size)
            group.start(0, *collective.arguments)
            land(group, 0, collective)
            both.append(group._ways.started > before)
    return both


def connections_are_made_once(me):
    """A process group; but anew where one rank has started another number of collectives there."""
    import cortado.group

    with own_group(me) as group:
        group.connect_both_ways()
        again = cortado.group.TorchGroup(group._group)
        assert again._ways is None  # not before all ranks ask for it
        again.connect_both_ways()
        assert again._ways is group._ways
        if me.rank == 1:
            again._ways.start()
        anew = cortado.group.TorchGroup(group._group)
        anew.connect_both_ways()
        assert anew._ways is not again._ways
        for kind in ("all_gather", "all_to_all"):
            collective = Collective(kind, UINT8, 0, 10**6, False, anew.rank, anew.world_size)
            anew.start(0, *collective.arguments)
            land(anew, 0, collective)
        assert anew._ways.started == 2


def starts_wait_for_nobody(me):
    """Rank 0 starts a large collective, then waits for rank 1 elsewhere; rank 1 the other way round, later than it took
    to connect."""
    import torch.distributed as dist

    other = dist.new_group([0, 1])
    with own_group(me) as group:
        group.connect_both_ways(4.0)
        for kind in ("all_gather", "all_to_all"):
            collective = Collective(kind, UINT8, 0, 10**6, False, group.rank, group.world_size)
            if me.rank == 1:
                time.sleep(1.5)
                dist.barrier(other)
            group.start(0, *collective.arguments)
            if me.rank == 0:
                dist.barrier(other)
            land(group, 0, collective)
    dist.destroy_process_group(other)


def front_ends_connect(me):
    """Which of them ask for connections each way, by how often they did."""
    import cortado
    import torch
    from cortado.group import TorchGroup
    from torch.nn.parallel import DistributedDataParallel

    asked = {}

    def record(name, make):
        with mock.patch.object(TorchGroup, "connect_both_ways", autospec=True) as connect:
            make()
        asked[name] = connect.call_count

    def attach(plan):
        cortado.attach(DistributedDataParallel(torch.nn.Linear(8, 8)), plan, verbose=False)

    option = [{"op": "all_reduce", "levels": ["flat"]}]
    plan = {
        "format": "cortado.plan/1",
        "job": "a layer",
        "cluster": "one level",
        "levels": [{"name": "flat", "ranks": me.world_size}],
        "buckets": [{"tensors": ["weight", "bias"], "codec": "none", "option": option}],
        "notes": [],
    }
    record("setting", lambda: attach("acp(rank=2)"))
    record("plan", lambda: attach(plan))
    record("auto", lambda: attach("auto"))
    record("K-FAC", lambda: cortado.KFAC(torch.nn.Linear(8, 8), verbose=False))
    record("gather", lambda: cortado.CompressedAllGather([torch.ones(8, 8)], [0], "quant(bits=8)"))
    record("calibrate", lambda: cortado.calibrate(codecs=["cast(bf16)"], budget_s=0.2))
    return asked


class Handle:
    """Of a collective that ends when told."""

    def __init__(self, error=None):
        self.has_ended, self.error, self.waited_s = False, error, []

    def is_completed(self):
        return self.has_ended

    def wait(self, timeout=None):
        self.waited_s.append(timeout and timeout.total_seconds())
        if not self.has_ended:
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error


def every_kind_in_subgroups(me):
    import cortado.group

    group = cortado.group.TorchGroup(None)
    half = me.world_size // 2
    inner = group.subgroup([me.rank // half * half + i for i in range(half)])
    outer = group.subgroup([me.rank % half + half * i for i in range(2)])
    assert (inner.rank, inner.world_size) == (me.rank % half, half)
    assert (outer.rank, outer.world_size) == (me.rank // half, 2)
    run_all(inner)
    run_all(outer)
    assert outer._ways.groups
    with mock.patch.object(cortado.group, "_BOTH_WAYS_BYTES", -1):
        run_all(inner)
        run_all(outer)
    again = group.subgroup([me.rank // half * half + i for i in range(half)])
    run_all(again)


def subgroups_beside_one_of_the_users(me):
    """Ranks 0 and 1 know of one process group more than the others."""
    import torch.distributed as dist
    from cortado.group import TorchGroup

    own = dist.new_group([0, 1], use_local_synchronization=True) if me.rank < 2 else None
    group = TorchGroup(None)
    inner = group.subgroup([me.rank // 2 * 2 + i for i in range(2)])
    outer = group.subgroup([me.rank % 2 + 2 * i for i in range(2)])
    run_all(outer)
    run_all(inner)
    assert group.subgroup([me.rank % 2, me.rank % 2 + 2]) is outer
    if own is not None:
        dist.destroy_process_group(own)


def sums_in_rank_order(me):
    from cortado.group import TorchGroup

    group = TorchGroup(None)
    sent = np.full(me.world_size, [1e8, 1, -1e8][me.rank], dtype=np.float32)
    received = np.full(1, 7, dtype=np.float32)
    group.start(0, "reduce_scatter", FLOAT32, sent.ctypes.data, received.ctypes.data, 1, 0, None, None)
    group.wait(0, 30.0)
    return float(received[0])


def blocks_left(me):
    """How many blocks of Python's memory 300 gathers and sums leave behind, each of other sizes and at other places."""
    from cortado.group import TorchGroup

    group = TorchGroup(None)
    sent = np.zeros(1000, dtype=np.uint8)
    received = np.zeros(1000 * me.world_size, dtype=np.uint8)
    place, gathered = sent.ctypes.data, received.ctypes.data

    def step(number):
        counts = [1 + (3 * number + 2 * rank) % 997 for rank in range(me.world_size)]
        group.start(2 * number, "all_gather", UINT8, place, gathered, 0, 0, counts, None)
        group.start(2 * number + 1, "all_reduce", UINT8, place + number, place + number, 8, 0, None, None)
        group.wait(2 * number, 30.0)
        group.wait(2 * number + 1, 30.0)

    for number in range(30):
        step(number)
    before = sys.getallocatedblocks()
    for number in range(30, 330):
        step(number)
    return sys.getallocatedblocks() - before


# ---- in pytest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_kind_of_collective(pools, world_size):
    pools(world_size).run(every_kind)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_over_a_connection_each_way(pools, world_size):
    pools(world_size).run(every_kind_over_a_connection_each_way)


@pytest.mark.parametrize("world_size, way", [(2, "up"), (3, "down")])
def test_every_kind_where_a_connection_fails(pools, world_size, way):
    pools(world_size).run(every_kind_where_a_connection_fails, way=way)


def test_starts_wait_for_nobody(pools):
    pools(2).run(starts_wait_for_nobody)


def test_connections_are_made_once(pools):
    pools(2).run(connections_are_made_once)


@pytest.mark.parametrize("world_size", [2, 3])
def test_front_ends_connect(pools, world_size):
    for asked in pools(world_size).run(front_ends_connect):
        assert asked.pop("setting") == (world_size == 2)
        assert set(asked.values()) == {1}, asked


def test_large_blocks_use_both_ways(pools):
    for both in pools(2).run(large_blocks_use_both_ways):
        assert both == [False, True, False, True, True, False, True, True]


def test_what_is_made_of_several_ends_with_the_last():
    from cortado.group import _Several

    first, second = Handle(), Handle()
    several = _Several([first, second])
    first.has_ended = True
    assert not several.is_completed()
    with pytest.raises(RuntimeError, match="timed out"):
        several.wait(timedelta(seconds=100))
    assert 80 < second.waited_s[0] <= 100  # what the first one has left of it
    second.has_ended = True
    assert several.is_completed()
    several.wait()
    several.wait(timedelta(seconds=1))


def test_what_is_made_of_several_fails_with_the_first_and_ends_with_the_last():
    """Until then the transport may write to its memory."""
    from cortado.group import _Several

    first, second = Handle(RuntimeError("connection reset")), Handle()
    several = _Several([first, second])
    first.has_ended = True
    assert not several.is_completed()
    with pytest.raises(RuntimeError, match="connection reset"):
        several.wait(timedelta(seconds=0.5))
    assert len(second.waited_s) == 1  # nobody asks again and again without a pause
    second.has_ended = True
    assert several.is_completed()


def test_every_kind_in_subgroups(pools):
    pools(4).run(every_kind_in_subgroups)


def test_subgroups_where_ranks_know_of_different_numbers_of_groups():
    pool = Pool(4)  # of its own: since PyTorch 2.15 no group of all these ranks can be made afterwards
    try:
        pool.run(subgroups_beside_one_of_the_users)
    finally:
        pool.close()


def test_reduce_scatter_adds_in_rank_order(pools):
    assert pools(3).run(sums_in_rank_order) == [0.0, 0.0, 0.0]  # (1e8 + 1) - 1e8


def test_collectives_leave_nothing(pools):
    """What stayed of every step would part the heap from which training takes its large tensors."""
    assert max(pools(2).run(blocks_left)) < 100


# ---- the end of a process --------------------------------------------------------------------------------------------

END_BEHIND_A_GATHER = """
import cortado, torch, torch.distributed as dist
dist.init_process_group("gloo")
try:
    cortado.CompressedAllGather([torch.ones(64, 64)] * 2, [0, 2], "quant(bits=8)")
except cortado.CortadoError:
    dist.destroy_process_group()
"""

END_BEHIND_A_SUM = """
import cortado, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
cortado.attach(model, "acp(rank=2, start_step=0)")
model(torch.ones(1, 64)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [END_BEHIND_A_GATHER, END_BEHIND_A_SUM], ids=["gather", "sum"])
def test_processes_that_end_behind_a_collective_end_well(tmp_path, program):
    """One in ten was aborted by a thread of Gloo that let go of a tensor while the interpreter ended."""
    for attempt in range(15):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [
            subprocess.Popen([sys.executable, "-c", program], env=variables | {"RANK": str(rank)}, cwd=tmp_path)
            for rank in range(2)
        ]
        assert [rank.wait(60) for rank in ranks] == [0, 0], attempt
