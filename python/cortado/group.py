# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The callback communicator's functions over a torch.distributed process group."""

import atexit
import copy
import ctypes
import functools
import struct
import sys
import time
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .agreement import SETUP_TIMEOUT_S, gather
from .errors import SpecError, without_frames
from .noticeboard import Noticeboard, first_line

# Codes of cortado/tensor_view.h.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BYTE_CODE = 3
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()} | {BYTE_CODE: torch.uint8}

_SLICE_S = 1.0  # how often a waiting rank looks whether a peer has reported a failure

# Longer than any memory, so that one type serves every size (ctypes keeps each that it makes). It allocates nothing;
# frombuffer(count=) says how much of it a tensor has.
_AnyMemory = ctypes.c_char * 2**46

_EXIT_S = 0.1  # see _outlive_transport()

_BOTH_WAYS_BYTES = 128 * 1024  # see TorchGroup.connect_both_ways(): what is less waits for little
_UNKNOWN = sys.maxsize  # a size
_THREADS = 4  # for each interface

_ways_of = weakref.WeakKeyDictionary()  # process group -> its _Ways
_attachments = Counter()  # by group; its ranks attach in the same order, so they share the number


class TorchGroup:
    """One process group, seen by the engine. Used by one thread at a time, which must hold the GIL.

    A sub-group shares the failures of the group it came from: what one rank announces ends the waits in all of them.
    """

    def __init__(self, process_group):
        _outlive_transport()
        self._group = process_group if process_group is not None else dist.group.WORLD
        self._whole = self
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self._ranks = list(range(self.world_size))  # in the whole group
        self.name = _backend_for_host_memory(self._group)
        self._works = {}
        self._ways = None  # see connect_both_ways()
        group_name = self._group.group_name
        prefix = f"cortado/{group_name}/{_attachments[group_name]}"
        _attachments[group_name] += 1
        self._board = Noticeboard(prefix, self.rank, self.world_size)
        self._subgroups = {}  # by their ranks
        self.set_timeout(1800.0)

    def set_timeout(self, timeout_s):
        """Of each collective. The transport must give up too, or a process with a hung peer could not end."""
        for group in [self, *self._subgroups.values()]:
            group._timeout = timedelta(seconds=min(timeout_s, 1e6))

    def shares_order_with(self, other):
        """Whether the collectives of both must be started in one order, the same on all ranks."""
        return self._group is other._group

    def subgroup(self, ranks):
        """The group of these ranks, the same each time; it lives as long as the whole one. Every rank calls it with
        the list it is in, and those of a list make it together."""
        whole = self._whole
        of_whole = tuple(self._ranks[rank] for rank in ranks)
        if of_whole not in whole._subgroups:
            whole._subgroups[of_whole] = whole._make_subgroup(of_whole)
        return whole._subgroups[of_whole]

    def _make_subgroup(self, ranks):
        made = copy.copy(self)
        made.rank, made.world_size, made._ranks = ranks.index(self.rank), len(ranks), list(ranks)
        made._works = {}
        made._ways = None
        try:
            made._group = self._make_backend(made.rank, ranks)
        except RuntimeError as error:
            raise self.failure(
                f"no connection among ranks {', '.join(map(str, ranks))}: {first_line(error)}"
            ) from error
        made.connect_both_ways()
        return made

    def _make_backend(self, rank, ranks):
        if self.name != "gloo":
            of_world = [dist.get_global_rank(self._group, rank) for rank in ranks]
            return dist.new_group(of_world, timeout=self._timeout, backend=self.name, use_local_synchronization=True)
        # new_group() that only these ranks call takes its name from how many groups a process knows of, which need not
        # be the same for all of them, and they would wait for each other for ever.
        store = self._board.store_of("ranks " + " ".join(map(str, ranks)))
        return dist.ProcessGroupGloo(store, rank, len(ranks), timeout=self._timeout)

    def connect_both_ways(self, timeout_s=SETUP_TIMEOUT_S):
        """From here on what two ranks send each other at once goes over a connection for each way, where blocks are
        large. All ranks call it, where they wait for each other anyway: a start() must not.

        Between two ranks Gloo has one connection, over which a rank also says that it is ready to receive. That waits
        behind what it sends, as far as the system has taken it, and so does the other one's sending: up to twice the
        time where both send. Where a connection fails on one of the ranks, all do with what they have.
        """
        if self.name != "gloo" or self.world_size == 1:
            return
        ways = _ways_of.get(self._group)
        # Those of before are not used where ranks do not have them all, or broke off in different collectives.
        started = struct.pack("<q", -1 if ways is None else ways.started)
        same = gather(self, started, timeout_s) == started * self.world_size
        if ways is None or not same:
            ways = _ways_of[self._group] = self._make_ways(timeout_s)
        self._ways = ways if ways.groups else None

    def _make_ways(self, timeout_s):
        failed = None
        try:
            groups = [self._connect(way, timedelta(seconds=timeout_s / 4)) for way in ("up", "down")]
        except Exception as error:
            groups, failed = (), error
        if all(gather(self, bytes([failed is None]), timeout_s)):
            return _Ways(groups)
        if failed is not None:
            warnings.warn(
                f"cortado: rank {self.rank} has no second connection to the others ({first_line(failed)}): what two "
                "ranks send each other at once takes up to twice as long",
                RuntimeWarning,
                stacklevel=2,
            )
        return _Ways(())

    def _connect(self, way, timeout):
        """A group of the same ranks over the same interfaces. Of more threads than Gloo has: each has a collective in
        hand, and small ones wait for the other rank's word longer than they take."""
        of = "all" if self is self._whole else "ranks " + " ".join(map(str, self._ranks))
        where = self._board.store_of(f"{of} {way}"), self.rank, self.world_size
        own = self._group if self is not self._whole else self._group._get_backend(torch.device("cpu"))
        if not isinstance(own, dist.ProcessGroupGloo):  # with TORCH_DISTRIBUTED_DEBUG=DETAIL it has another around it
            return dist.ProcessGroupGloo(*where, timeout=timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = own.options._devices
        options._threads = _THREADS * len(options._devices)
        options._timeout = timeout
        return dist.ProcessGroupGloo(*where, options)

    # ---- what the engine calls

    def start(self, work, kind, dtype, sent, received, elems, root, counts, received_counts):
        """Starts collective number `work`; the arguments are the fields of CollectiveCall (communicator.h).

        What is raised here says that nothing was taken. A Ctrl-C, or what else a signal handler raises, may come when
        the transport has the collective and before anybody has its handle: test() and wait() raise that, of a
        collective whose end is not known, so that the engine leaves its memory alone.
        """
        call = _Call(_DTYPES[dtype], sent, received, elems, root, counts, received_counts)
        start = getattr(self, "_" + kind)
        try:
            self._works[work] = start(call)
        except BaseException as error:
            self._works[work] = _Started(_Lost(without_frames(error)))

    # Both may be asked again of one that has ended, which is not kept any more.

    def test(self, work):
        if work not in self._works:
            return True
        if not self._works[work].handle.is_completed():
            return False
        self.wait(work, 1.0)  # raises what the collective raised
        return True

    def wait(self, work, timeout_s):
        started = self._works.get(work)
        if started is None:
            return
        deadline = time.monotonic() + timeout_s
        while True:
            slice_s = max(0.001, min(_SLICE_S, deadline - time.monotonic()))
            try:
                started.handle.wait(timedelta(seconds=slice_s))
                self._end(work)
                return
            except RuntimeError as error:
                if started.handle.is_completed() and not self._succeeded(started.handle):
                    raise self.failure(f"collective failed: {first_line(error)}") from error
                if started.handle.is_completed():  # it ended well just after the slice did
                    self._end(work)
                    return
            self.check_peers()
            if time.monotonic() >= deadline:
                raise TimeoutError(str(self.failure(f"no result within {timeout_s:g} s")))

    def _end(self, work):
        finish = self._works[work].finish
        if finish is not None:
            finish()
        del self._works[work]

    @staticmethod
    def _succeeded(handle):
        try:
            handle.wait()
        except RuntimeError:
            return False
        return True

    def all_reduce(self, tensor, timeout_s):
        """Sums a tensor over the ranks, in place."""
        work = "all_reduce"  # the engine's are numbers
        self._works[work] = _Started(self._group.allreduce([tensor], self._options(dist.AllreduceOptions())))
        self.wait(work, timeout_s)

    def all_gather(self, sent, timeout_s):
        own = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        options = self._options(dist.distributed_c10d.AllgatherOptions())
        work = "all_gather"
        self._works[work] = _Started(self._group.allgather([parts], [own], options))
        self.wait(work, timeout_s)
        return b"".join(part.numpy().tobytes() for part in parts)

    # ---- kinds of collectives
    #
    # Gloo sums in place, gathers and scatters equal blocks only, and has no reduce-scatter in older versions. What is
    # left goes through all-to-all, which moves exactly the bytes that must travel, in one round.

    def _all_reduce(self, call):
        tensor = self._tensor(call.received, call.elems, call.dtype)
        if call.sent != call.received:
            tensor.copy_(self._tensor(call.sent, call.elems, call.dtype))
        return _Started(self._group.allreduce([tensor], self._options(dist.AllreduceOptions())))

    def _broadcast(self, call):
        data = call.sent if self.rank == call.root else call.received
        options = self._options(dist.BroadcastOptions())
        options.rootRank = call.root
        return _Started(self._group.broadcast([self._tensor(data, call.elems, call.dtype)], options))

    def _reduce(self, call):
        if self.world_size == 2:
            return self._reduce_of_two(call)
        own = self._tensor(call.sent, call.elems, call.dtype)
        if self.rank != call.root:
            own = own.clone()  # the transport adds in it
        elif call.sent != call.received:
            own = self._tensor(call.received, call.elems, call.dtype).copy_(own)
        options = self._options(dist.ReduceOptions())
        options.rootRank = call.root
        return _Started(self._group.reduce([own], options), own)

    def _reduce_of_two(self, call):
        """Gloo's own way sends half as much again."""
        is_root = self.rank == call.root
        own = self._tensor(call.sent, call.elems, call.dtype)
        to_root = [call.elems if rank == call.root else 0 for rank in range(2)]
        if not is_root:
            return self._exchange_at_once(torch.empty(0, dtype=call.dtype), own, [0, 0], to_root)
        parts = torch.empty(2 * call.elems, dtype=call.dtype)
        result = self._tensor(call.received, call.elems, call.dtype)
        started = self._exchange_at_once(parts, own, [call.elems] * 2, to_root)
        started.finish = lambda: _sum_in_rank_order(parts.view(2, -1), result)
        return started

    def _all_gather(self, call):
        counts = call.counts or [call.elems] * self.world_size
        if self.world_size == 2 and self._uses_both_ways(max(counts), call.dtype):
            return self._all_gather_of_two(call, counts)
        if call.counts is None:
            own = self._tensor(call.sent, call.elems, call.dtype)
            everything = self._tensor(call.received, call.elems * self.world_size, call.dtype)
            options = self._options(dist.distributed_c10d.AllgatherOptions())
            return _Started(self._group._allgather_base(everything, own, options))
        count = counts[self.rank]
        copies = self._tensor(call.sent, count, call.dtype).repeat(self.world_size)
        everything = self._tensor(call.received, sum(counts), call.dtype)
        return self._exchange(everything, copies, counts, [count] * self.world_size, max(counts))

    def _all_gather_of_two(self, call, counts):
        parts = self._tensor(call.received, sum(counts), call.dtype).split(counts)
        if call.sent != parts[self.rank].data_ptr():
            parts[self.rank].copy_(self._tensor(call.sent, counts[self.rank], call.dtype))
        handles = []
        for root, (group, part) in enumerate(zip(self._ways.start(), parts, strict=True)):
            options = self._options(dist.BroadcastOptions())
            options.rootRank = root
            handles.append(group.broadcast([part], options))
        return _Started(_Several(handles))

    def _gather(self, call):
        counts = call.counts or [call.elems] * self.world_size
        is_root = self.rank == call.root
        own = self._tensor(call.sent, counts[self.rank], call.dtype)
        everything = self._tensor(call.received, sum(counts) if is_root else 0, call.dtype)
        to_root = [counts[self.rank] if rank == call.root else 0 for rank in range(self.world_size)]
        return self._exchange_at_once(everything, own, counts if is_root else [0] * self.world_size, to_root)

    def _all_to_all(self, call):
        sent_counts = call.counts or [call.elems] * self.world_size
        received_counts = call.received_counts or sent_counts
        sent = self._tensor(call.sent, sum(sent_counts), call.dtype)
        received = self._tensor(call.received, sum(received_counts), call.dtype)
        largest = _UNKNOWN if call.counts else call.elems  # blocks of two other ranks may be larger
        return self._exchange(received, sent, received_counts, sent_counts, largest)

    def _reduce_scatter(self, call):
        counts = call.counts or [call.elems] * self.world_size
        sent = self._tensor(call.sent, sum(counts), call.dtype)
        parts = torch.empty(counts[self.rank] * self.world_size, dtype=call.dtype)
        result = self._tensor(call.received, counts[self.rank], call.dtype)
        started = self._exchange(parts, sent, [counts[self.rank]] * self.world_size, counts, max(counts))
        started.finish = lambda: _sum_in_rank_order(parts.view(self.world_size, -1), result)
        return started

    def _uses_both_ways(self, block, dtype):
        """Whether blocks of so many elements are to have a connection for each way."""
        return self._ways is not None and block * dtype.itemsize > _BOTH_WAYS_BYTES

    def _exchange(self, received, sent, received_counts, sent_counts, largest):
        """`largest`: block of any two ranks, so the same on all of them."""
        if not self._uses_both_ways(largest, sent.dtype):
            return self._exchange_at_once(received, sent, received_counts, sent_counts)
        up, down = self._ways.start()
        from_lower, own, from_higher = self._split(received, received_counts)
        to_lower, kept, to_higher = self._split(sent, sent_counts)
        own.copy_(kept)
        lower, higher = range(self.rank), range(self.rank + 1, self.world_size)
        options = self._options(dist.AllToAllOptions())
        handles = [
            group.alltoall_base(into, out, _only(received_counts, senders), _only(sent_counts, receivers), options)
            for group, into, out, senders, receivers in (
                (up, from_lower, to_higher, lower, higher),
                (down, from_higher, to_lower, higher, lower),
            )
        ]
        return _Started(_Several(handles), sent)

    def _split(self, tensor, counts):
        """The blocks of lower ranks, of this one, of higher ones."""
        return tensor.split([sum(counts[: self.rank]), counts[self.rank], sum(counts[self.rank + 1 :])])

    def _exchange_at_once(self, received, sent, received_counts, sent_counts):
        options = self._options(dist.AllToAllOptions())
        return _Started(self._group.alltoall_base(received, sent, received_counts, sent_counts, options), sent)

    def _options(self, options):
        options.timeout = self._timeout
        options.asyncOp = True
        return options

    # ---- failures

    def peer_has_failed(self):
        return self._board.somebody_failed()

    def check_peers(self):
        """Raises if a peer is known to have failed; does not wait for peers."""
        if self.peer_has_failed():
            raise self.failure("a peer reported a failure")

    def announce(self, why):
        """Tells the other ranks that this one takes no further part; they stop waiting for it within about a second.
        As the interpreter ends, which starts no thread any more, nobody is told: the process goes, too."""
        if not sys.is_finalizing():
            self._board.announce(why)

    def failure(self, what):
        """The error of a broken collective, with the ranks that caused it, as far as the others can tell."""
        self.announce(what)
        return RuntimeError(f"{self._board.roll_call()} ({what})")

    # ---- memory

    @staticmethod
    def _tensor(data, elems, dtype):
        """A tensor over memory of the engine (or of DDP's bucket). Not kept: places and sizes vary, and what stayed of
        every step would part the heap. A large gradient then finds no room but at the heap's end, which the C library
        gives back and takes again, page by page, every few steps."""
        if elems == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(_AnyMemory.from_address(data), dtype=dtype, count=elems)


@dataclass
class _Call:
    dtype: torch.dtype
    sent: int  # addresses
    received: int
    elems: int
    root: int
    counts: list | None  # None: blocks of `elems`
    received_counts: list | None


@dataclass
class _Started:
    handle: object  # of torch.distributed
    held: object = None  # memory that must stay until the end
    finish: object = None  # what is to be done then


class _Ways:
    """The groups of connect_both_ways(), up and down, or none; and how many collectives were started in them."""

    def __init__(self, groups):
        self.groups = groups
        self.started = 0

    def start(self):
        self.started += 1
        return self.groups


class _Several:
    """In place of the handle of a collective that is made of several: it has ended when all of them have."""

    def __init__(self, handles):
        self._handles = handles

    def is_completed(self):
        return all(handle.is_completed() for handle in self._handles)

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        failed = None
        for handle in self._handles:
            try:
                if deadline is None:
                    handle.wait()
                else:
                    handle.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                failed = failed or error
        if failed is not None:
            raise failed


class _Lost:
    """In place of the handle of a collective that may have been started."""

    def __init__(self, error):
        self._error = error

    def is_completed(self):
        raise without_frames(self._error)

    def wait(self, *_):
        raise without_frames(self._error)


@functools.cache
def _outlive_transport():
    """A thread of Gloo may be the last to hold a tensor of a collective that has just ended, and takes the GIL to let
    go of it. If the interpreter ends by then, that is std::terminate() (seen with torch 2.13): it gets a moment."""
    atexit.register(time.sleep, _EXIT_S)


def takes_host_memory(group):
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def _backend_for_host_memory(group):
    """Its name. What the engine sends lies in host memory, on whichever device gradients are."""
    try:
        return group._get_backend(torch.device("cpu")).name()
    except RuntimeError as error:
        raise SpecError(
            f'the process group "{dist.get_backend(group)}" can not send what lies in host memory, as what cortado '
            'sends does: make it with init_process_group("cpu:gloo,cuda:nccl"), so that the rest keeps using NCCL, or '
            'give cortado one of its own: process_group=torch.distributed.new_group(backend="gloo")'
        ) from error


def _only(counts, ranks):
    """`counts` of these ranks, 0 of the others."""
    return [count if rank in ranks else 0 for rank, count in enumerate(counts)]


def _sum_in_rank_order(parts, result):
    """As the other communicators add: in float32, rounded once; uint8 wraps."""
    wide = parts.float() if parts.is_floating_point() else parts
    total = wide[0].clone()
    for part in wide[1:]:
        total += part
    result.copy_(total)
