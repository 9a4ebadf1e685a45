# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The callback communicator's functions over a torch.distributed process group."""

import ctypes
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

# Codes of cortado/tensor_view.h.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BYTE_CODE = 3
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()} | {BYTE_CODE: torch.uint8}

_SLICE_S = 1.0  # how often a waiting rank looks whether a peer has reported a failure
_ROLL_CALL_S = 5.0  # how long failed ranks wait for each other before they name who is missing

_MOST_TENSORS = 4096  # kept; payloads of varying sizes would make more and more

_attachments = Counter()  # by group; its ranks attach in the same order, so they share the number


class TorchGroup:
    """One process group, seen by the engine. Used by one thread at a time, which must hold the GIL."""

    def __init__(self, process_group):
        self._group = process_group if process_group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self.name = str(dist.get_backend(self._group))
        group_name = self._group.group_name
        prefix = f"cortado/{group_name}/{_attachments[group_name]}"
        _attachments[group_name] += 1
        self._store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.set_timeout(1800.0)
        self._works = {}
        self._tensors = {}
        self._failed = False

    def set_timeout(self, timeout_s):
        """Of each collective. The transport must give up too, or a process with a hung peer could not end."""
        self._all_reduce_options = _with_timeout(dist.AllreduceOptions(), timeout_s)
        self._all_gather_options = _with_timeout(dist.distributed_c10d.AllgatherOptions(), timeout_s)

    # ---- what the engine calls

    def start(self, work, kind, dtype, sent, received, elems, root, counts, received_counts):
        """Starts collective number `work`; the arguments are the fields of CollectiveCall (communicator.h)."""
        if kind == "all_reduce" and sent == received:
            tensor = self._tensor(received, elems, _DTYPES[dtype])
            self._works[work] = self._group.allreduce([tensor], self._all_reduce_options)
        elif kind == "all_gather" and counts is None:
            own = self._tensor(sent, elems, _DTYPES[dtype])
            all_ranks = self._tensor(received, elems * self.world_size, _DTYPES[dtype])
            self._works[work] = self._group._allgather_base(all_ranks, own, self._all_gather_options)
        else:
            raise NotImplementedError(f"{kind} over torch.distributed")

    def test(self, work):
        if not self._works[work].is_completed():
            return False
        self.wait(work, 1.0)  # raises what the collective raised
        return True

    def wait(self, work, timeout_s):
        handle = self._works[work]
        deadline = time.monotonic() + timeout_s
        while True:
            slice_s = max(0.001, min(_SLICE_S, deadline - time.monotonic()))
            try:
                handle.wait(timedelta(seconds=slice_s))
                del self._works[work]
                return
            except RuntimeError as error:
                if handle.is_completed() and not self._succeeded(handle):
                    raise self.failure(f"collective failed: {_first_line(error)}") from error
                if handle.is_completed():  # it ended well just after the slice did
                    del self._works[work]
                    return
            if self._peer_has_failed():
                raise self.failure("a peer reported a failure")
            if time.monotonic() >= deadline:
                raise TimeoutError(str(self.failure(f"no result within {timeout_s:g} s")))

    @staticmethod
    def _succeeded(handle):
        try:
            handle.wait()
        except RuntimeError:
            return False
        return True

    def all_gather(self, sent, timeout_s):
        own = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        options = _with_timeout(dist.distributed_c10d.AllgatherOptions(), timeout_s)
        try:
            self._group.allgather([parts], [own], options).wait(options.timeout)
        except RuntimeError as error:
            raise self.failure(f"all-gather failed: {_first_line(error)}") from error
        return b"".join(part.numpy().tobytes() for part in parts)

    # ---- failures

    def announce(self, why):
        """Tells the other ranks that this one takes no further part; they stop waiting for it within about a second."""
        if self._failed:
            return
        self._failed = True
        try:
            self._store.set(f"failed/{self.rank}", f"rank {self.rank}: {why}"[:500])
            self._store.set("failed/any", "1")
        except RuntimeError:
            pass  # the store went with its host; failure() says so

    def failure(self, what):
        """The error of a broken collective, with the ranks that caused it, as far as the others can tell."""
        self.announce(what)
        return RuntimeError(f"{self._roll_call()} ({what})")

    def _peer_has_failed(self):
        try:
            return self._store.check(["failed/any"])
        except RuntimeError:
            return True

    def _roll_call(self):
        missing = set(range(self.world_size)) - {self.rank}
        deadline = time.monotonic() + _ROLL_CALL_S
        try:
            while missing and time.monotonic() < deadline:
                missing = {rank for rank in missing if not self._store.check([f"failed/{rank}"])}
                if missing:
                    time.sleep(0.05)
            others = sorted(set(range(self.world_size)) - missing - {self.rank})
            said = [self._store.get(f"failed/{rank}").decode() for rank in others]
        except RuntimeError as error:
            return f"the rendezvous store is gone too ({_first_line(error)}), so its host, usually rank 0, has ended"
        if missing:
            names = ", ".join(str(rank) for rank in sorted(missing))
            return f"rank {names} did not answer within {_ROLL_CALL_S:g} s: gone, stuck, or in another step"
        return "every rank answered: " + " | ".join(said)

    # ---- memory

    def _tensor(self, data, elems, dtype):
        """A tensor over memory of the engine (or of DDP's bucket); kept for the next time."""
        key = (data, elems, dtype)
        tensor = self._tensors.get(key)
        if tensor is None:
            if len(self._tensors) >= _MOST_TENSORS:
                self._tensors.clear()
            array = (ctypes.c_char * (elems * dtype.itemsize)).from_address(data)
            tensor = self._tensors[key] = torch.frombuffer(array, dtype=dtype)
        return tensor


def _with_timeout(options, timeout_s):
    options.timeout = timedelta(seconds=min(timeout_s, 1e6))
    options.asyncOp = True
    return options


def _first_line(error):
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
