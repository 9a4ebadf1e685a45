# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""A device that is none, for tests without a GPU: gradients stay in host memory, but are treated as if on a device.

    with late_device():
        model = me.attach(net, "acp")   # every attachment made in here copies its gradients there and back

The real SideStream runs, over a torch.cuda whose streams do their work as late as they may: when somebody waits for an
event, or has looked at it some times. Until then what is copied to holds NaN. What is copied is read then, not before.
So who reads too early, or overwrites too early, gets other results than without a device. A copy from or to a gradient
that was not made to wait for the stream that computes copies NaN.
"""

import contextlib
import math

import cortado.attachment
import torch
from cortado.side_stream import SideStream

_LOOKS = 3  # at an event, until it has been reached


class LateStream:
    """Work in order, done when it must be."""

    def __init__(self, _device=None):
        self._work = []
        self._done = 0
        self._waits_for = {}  # stream -> how much of its work

    @property
    def given(self):
        return len(self._work)

    def give(self, work):
        self._work.append(work)

    def comes_after(self, stream):
        """Whether what this stream is given now is done after all that ``stream`` has been given."""
        return self._waits_for.get(stream) == stream.given

    def wait_event(self, event):
        stream, position = event.stream, event.position
        self._waits_for[stream] = position
        self.give(lambda: stream.run_to(position))

    def run_to(self, position):
        while self._done < position:
            work, self._work[self._done] = self._work[self._done], None
            self._done += 1
            work()


class LateEvent:
    def record(self, stream):
        self.stream, self.position, self.looks = stream, stream.given, 0

    def query(self):
        self.looks += 1
        if self.looks <= _LOOKS:
            return False
        self.synchronize()
        return True

    def synchronize(self):
        self.stream.run_to(self.position)


class ComputeStream(LateStream):
    """Really everything is computed at once here. Each gradient counts as one piece of work given."""

    def wait_event(self, event):
        event.synchronize()


class LateCuda:
    """torch.cuda, as far as SideStream knows it."""

    Stream, Event = LateStream, LateEvent

    def __init__(self):
        self.compute = ComputeStream()
        self.compute.give(lambda: None)
        self.current = self.compute

    def current_stream(self, _device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class LateSideStream(SideStream):
    def __init__(self, device):
        self._cuda = LateCuda()
        self._hosts, self._temporaries = set(), set()  # addresses of their memory
        self._kept = []  # so that no other gets these addresses
        self._fetches = True
        super().__init__(device)

    def host_memory(self, like):
        return self._keep(torch.empty_like(like, device="cpu"), self._hosts)

    def _device_memory(self, like):
        return self._keep(torch.empty_like(like), self._temporaries)

    def _keep(self, tensor, among):
        fill_with_nan(tensor)
        self._kept.append(tensor)
        among.add(tensor.untyped_storage().data_ptr())
        return tensor

    def fetch(self, host, tensor):
        self._turn_around(fetches=True)
        super().fetch(host, tensor)

    def send(self, tensor, host):
        self._turn_around(fetches=False)
        super().send(tensor, host)

    def _turn_around(self, fetches):
        """What is copied the other way comes later on the same stream, so nothing is lost by what is done before."""
        if fetches != self._fetches:
            self._stream.run_to(self._stream.given)
        self._fetches = fetches

    def _copy(self, to, source):
        compute, stream = self._cuda.compute, self._cuda.current
        ours = self._hosts | self._temporaries
        takes_part = any(tensor.untyped_storage().data_ptr() not in ours for tensor in (to, source))  # a gradient
        is_ready = not takes_part or stream.comes_after(compute)
        if takes_part:
            compute.give(lambda: None)
        fill_with_nan(to)
        stream.give(lambda: to.copy_(source) if is_ready else None)
        return to

    def future(self):
        return LateFuture(self._cuda)


class LateFuture(torch.futures.Future):
    """Who waits for it gets what the stream that was current then had been given."""

    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda

    def set_result(self, result):
        self._cuda.current.run_to(self._cuda.current.given)
        super().set_result(result)


def fill_with_nan(tensor):
    if tensor.is_floating_point():
        tensor.fill_(math.nan)
    else:
        tensor.fill_(0xFF)  # of bytes; NaN in each dtype


class OnDevice(torch.Tensor):
    """A tensor as torch.load(..., map_location="cuda") gives it: numpy takes it from host memory only."""

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    def numpy(self):
        raise TypeError("can't convert a tensor on a device to numpy: use Tensor.cpu() first")


def on_device(state):
    """A state, of dicts, with its tensors there."""
    if isinstance(state, dict):
        return {key: on_device(value) for key, value in state.items()}
    return state.as_subclass(OnDevice) if isinstance(state, torch.Tensor) else state


@contextlib.contextmanager
def late_device(side_stream=LateSideStream):
    before, cortado.attachment.side_stream_of = cortado.attachment.side_stream_of, side_stream
    try:
        yield
    finally:
        cortado.attachment.side_stream_of = before
