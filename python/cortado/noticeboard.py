# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other outside of their process group, once that may be broken: who has failed, and why."""

import itertools
import queue
import threading
import time
import weakref

import torch.distributed as dist

from .errors import sendable

_ROLL_CALL_S = 5.0  # how long failed ranks wait for each other before they name who is missing
_STORE_S = 2.0  # how long the store may take for an answer


class StoreIsSilent(RuntimeError):
    """The store did not answer in time."""


class Noticeboard:
    """Over the rendezvous store. Of one rank; ``prefix`` is the same on all ranks of the group and nobody else's."""

    def __init__(self, prefix, rank, world_size):
        self._whole_store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self._store = _PatientStore(self._whole_store)
        self._rank = rank
        self._world_size = world_size
        self._announced = False

    def store_of(self, what):
        """A part of the store for other uses, the same on all ranks that ask for it by this name."""
        return dist.PrefixStore(what, self._whole_store)

    def announce(self, why):
        """This rank takes no further part; the others stop waiting for it within about a second. The first reason
        stays."""
        if self._announced:
            return
        said = {"failed/any": "1", f"failed/{self._rank}": f"rank {self._rank}: {sendable(why)}"[:500]}
        try:
            number = self._store.begin_set(said)  # all of it, so that who gives up waiting for the store has said it
            self._announced = True
            self._store.answer_to(number)
        except RuntimeError:
            pass  # the store went with its host, or the link to it; roll_call() says so

    def somebody_failed(self):
        """Whether it is known that a rank has failed; the end of the store's host counts, silence does not."""
        try:
            return self._store.check(["failed/any"])
        except StoreIsSilent:
            return False
        except RuntimeError:
            return True

    def roll_call(self):
        """What the other ranks say of their failures, and which say nothing, as one sentence. Takes some seconds."""
        missing = set(range(self._world_size)) - {self._rank}
        deadline = time.monotonic() + _ROLL_CALL_S
        try:
            while missing and time.monotonic() < deadline:
                missing = {rank for rank in missing if not self._store.check([f"failed/{rank}"])}
                if missing:
                    time.sleep(0.05)
            others = sorted(set(range(self._world_size)) - missing - {self._rank})
            said = [self._store.get(f"failed/{rank}").decode() for rank in others]
        except StoreIsSilent:
            return "the rendezvous store does not answer: its host, usually rank 0, or the link to it is gone"
        except RuntimeError as error:
            return f"the rendezvous store is gone too ({first_line(error)}), so its host, usually rank 0, has ended"
        if missing:
            names = ", ".join(str(rank) for rank in sorted(missing))
            return f"rank {names} did not answer within {_ROLL_CALL_S:g} s: gone, stuck, or in another step"
        return "every rank answered: " + " | ".join(said)


class _PatientStore:
    """The calls of a store, each for _STORE_S at most. A store behind a cut link keeps its caller for ever, so a thread
    calls it, which is made at the first call and ends with this, once the store lets it."""

    def __init__(self, store):
        self._store = store
        self._thread = None
        self._calls = queue.SimpleQueue()
        self._answers = queue.SimpleQueue()
        self._numbers = itertools.count()

    def begin_set(self, values):
        """All of ``values``, in this order. Returns what answer_to() takes."""
        return self._begin(_set_all, self._store, values)

    def get(self, key):
        return self.answer_to(self._begin(self._store.get, key))

    def check(self, keys):
        return self.answer_to(self._begin(self._store.check, keys))

    def _begin(self, call, *arguments):
        if self._thread is None:
            thread = threading.Thread(target=_serve, args=(self._calls, self._answers), daemon=True)
            thread.start()
            self._thread = thread
            weakref.finalize(self, self._calls.put, None).atexit = False
        number = next(self._numbers)
        self._calls.put((number, call, arguments))
        return number

    def answer_to(self, number):
        deadline = time.monotonic() + _STORE_S
        while True:
            try:
                answered, value, error = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise StoreIsSilent(f"no answer from the rendezvous store within {_STORE_S:g} s") from None
            if answered != number:  # to one that was given up, by its time or by Ctrl-C
                continue
            if error is not None:
                raise error
            return value


def _set_all(store, values):
    for key, value in values.items():
        store.set(key, value)


def _serve(calls, answers):
    while (asked := calls.get()) is not None:
        number, call, arguments = asked
        try:
            answers.put((number, call(*arguments), None))
        except Exception as error:
            answers.put((number, None, error))
        del asked, call, arguments  # the store, which would wait here for the next call


def first_line(error):
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
