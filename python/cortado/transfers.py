# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""How gradients get to where the engine reads and writes them, and back."""

import time
from collections import deque

import torch

from .errors import CortadoError, PeerError

_LOOK_S = 50e-6  # between two looks at the device, for who has nothing else to do
_PEERS_S = 1.0  # how often it is asked meanwhile whether a peer has failed


class HostTransfers:
    """Gradients are in host memory: what is copied, for its order in memory, has arrived at once."""

    in_place = True  # the engine may be given the gradients themselves
    device_stream = 0  # the address of the one that an engine on a device follows and leads
    wait_ns = 0

    def host_memory(self, like):
        return torch.empty_like(like, device="cpu")

    def begin(self, call):
        call()

    def fetch(self, host, tensor):
        host.copy_(tensor)

    def when_fetched(self, call):
        call()

    def hand_over_all(self):
        pass

    def send(self, tensor, host):
        tensor.copy_(host)

    def join(self):
        pass

    def future(self):
        return torch.futures.Future()

    def complete(self, future, value):
        future.set_result(value)


class DeviceEngineTransfers:
    """Gradients are on a device, and so is the engine, which is given them as they are."""

    in_place = True
    wait_ns = 0  # the engine waits for the device itself: the stage `wait`

    def __init__(self, compute):
        self._compute = compute
        self.device_stream = 0  # of the step in hand

    def begin(self, call):
        self.device_stream = self._compute.begin_step()
        call()

    def when_fetched(self, call):
        self._compute.follow()
        call()

    def hand_over_all(self):
        pass

    def send(self, tensor, ordered):
        self._compute.join()
        tensor.copy_(ordered)

    def join(self):
        self._compute.join()

    def future(self):
        return self._compute.future()

    def complete(self, future, value):
        self._compute.join()
        future.set_result(value)


class DeviceTransfers:
    """Gradients are on a device, and copied to pinned memory and back on its side stream.

    Whoever calls goes on at once; hand_over_all() is where the thread waits.

    poll: called again and again while the device is waited for.
    """

    in_place = False
    device_stream = 0

    def __init__(self, side, poll, group, timeout_s):
        self._side = side
        self._poll = poll
        self._group = group
        self._timeout_s = timeout_s
        self._fetching = deque()  # (event, what to do once it has been reached), in the order of the stream
        self._unused_events = []
        self._beginning = None  # what is to be called before the first of them
        self.wait_ns = 0  # in which the thread had nothing to do but poll()

    def host_memory(self, like):
        return self._side.host_memory(like)

    def begin(self, call):
        """Calls it when the first of what is fetched after it has arrived, before anything else.

        It may wait for what the device was given before that, such as the scale of the loss: all of that is done then.
        """
        self._beginning = call

    def fetch(self, host, tensor):
        """``host`` gets the values that ``tensor`` has once the caller's stream has done what it was given."""
        self._side.follow()
        self._side.fetch(host, tensor)

    def when_fetched(self, call):
        """Calls it, here or in a later call, once everything fetched so far has arrived; in the order given."""
        event = self._unused_events.pop() if self._unused_events else self._side.event()
        self._side.record(event)
        self._fetching.append((event, call))
        self._hand_over_arrived()

    def _hand_over_arrived(self):
        while self._fetching and self._fetching[0][0].query():
            event, call = self._fetching.popleft()
            self._unused_events.append(event)
            if self._beginning is not None:
                beginning, self._beginning = self._beginning, None
                with self._side.idle():
                    beginning()
            call()

    def hand_over_all(self):
        """Returns when all of them have been called."""
        start = time.monotonic()
        next_peers = start + _PEERS_S
        self._hand_over_arrived()
        while self._fetching:
            now = time.monotonic()
            if now >= next_peers:
                self._look_for_failures(now - start)
                next_peers = now + _PEERS_S
            if self._beginning is None:
                self._poll()
            time.sleep(_LOOK_S)
            self.wait_ns += round((time.monotonic() - now) * 1e9)
            self._hand_over_arrived()

    def _look_for_failures(self, waited_s):
        """The device may itself wait for ever for a peer that is gone."""
        if self._group.peer_has_failed():
            raise PeerError(str(self._group.failure("gradients: a peer reported a failure")))
        if waited_s >= self._timeout_s:
            raise CortadoError(f"the device has not computed the gradients within {self._timeout_s:g} s", "timeout")

    def read(self, tensor):
        """A copy in host memory, for which it waits; for what happens seldom."""
        host, event = self._side.host_memory(tensor), self._side.event()
        self.fetch(host, tensor)
        self._side.record(event)
        event.synchronize()
        return host

    def send(self, tensor, host):
        """``tensor`` gets the values of ``host``, which stays as it is until the next fetch() to it.

        The caller's stream may still read what was there before.
        """
        self._side.follow()
        self._side.send(tensor, host)

    def join(self):
        """What was sent is there for all that the caller gives his stream from now on."""
        self._side.join()

    def future(self):
        return self._side.future()

    def complete(self, future, value):
        """Whoever waits for the future gets what was sent before."""
        self._side.complete(future, value)
