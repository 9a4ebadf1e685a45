# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Streams of a CUDA device: everything that the adapters ask of a GPU (docs/adr/0031, 0032)."""

import torch

from .errors import SpecError


def device_of(named):
    """The one device of the tensors in ``named``, a list as parameters.trainable_of() gives it."""
    first = {}  # device -> name of its first parameter
    for name, parameter, _ in named:
        first.setdefault(parameter.device, name)
    if len(first) > 1:
        found = ", ".join(f'"{name}" on {device}' for device, name in first.items())
        raise SpecError(f"cortado exchanges tensors of one device a process; here {found}")
    for device, name in first.items():
        if device.type not in ("cpu", "cuda"):
            raise SpecError(f'cortado exchanges tensors on the CPU or on a CUDA device; "{name}" is on {device}')
        return device
    return torch.device("cpu")


def is_capturing(device):
    """Whether a CUDA graph is being captured of what the caller gives ``device``."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def address_of_current_stream(device):
    """0 where gradients are in host memory."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def side_stream_of(device):
    """None where gradients are in host memory anyway."""
    return SideStream(device) if device.type == "cuda" else None


class SideStream:
    """Copies between a device and pinned host memory, beside the stream that computes.

    No call waits for the device. Host memory that is copied to may be read, and host memory that is copied from may be
    changed, once an event recorded behind the copy has been reached.
    """

    _cuda = torch.cuda

    def __init__(self, device):
        self._device = device
        self._stream = self._cuda.Stream(device)
        self._idle = self._cuda.Stream(device)
        self._turn = self._cuda.Event()  # a stream that waits for it has taken note when the call returns

    def host_memory(self, like):
        """Of the shape, dtype and order in memory of ``like``."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def event(self):
        return self._cuda.Event()

    def follow(self):
        """What this stream is given from now on comes after all that the caller's stream has been given."""
        self._turn.record(self._cuda.current_stream(self._device))
        self._stream.wait_event(self._turn)

    def join(self):
        """What the caller's stream is given from now on comes after all that this stream has been given."""
        self._turn.record(self._stream)
        self._cuda.current_stream(self._device).wait_event(self._turn)

    def idle(self):
        """Makes a stream current that has nothing to do: what reads from the device in here waits for no other work."""
        return self._cuda.stream(self._idle)

    # Copies between host and device are of equal strides; PyTorch would make others through memory that is not pinned.

    def fetch(self, host, tensor):
        with self._cuda.stream(self._stream):
            if tensor.stride() != host.stride():
                tensor = self._copy(self._device_memory(host), tensor)
            self._copy(host, tensor)

    def send(self, tensor, host):
        with self._cuda.stream(self._stream):
            if tensor.stride() != host.stride():
                host = self._copy(self._device_memory(host), host)
            self._copy(tensor, host)

    def record(self, event):
        event.record(self._stream)

    def future(self):
        return torch.futures.Future(devices=[self._device])

    def complete(self, future, value):
        """Whoever waits for the future makes his stream wait for what this one has been given so far."""
        with self._cuda.stream(self._stream):
            future.set_result(value)

    def _device_memory(self, like):
        return torch.empty_like(like, device=self._device)

    def _copy(self, to, source):
        return to.copy_(source, non_blocking=True)


class ComputeStream:
    """The stream of a step that an engine on the device takes its order from: the caller's when the step began."""

    _cuda = torch.cuda

    def __init__(self, device):
        self._device = device
        self._stream = None

    def begin_step(self):
        """Returns its address."""
        self._stream = self._cuda.current_stream(self._device)
        return self._stream.cuda_stream

    def follow(self):
        """What it is given from now on comes after all that the caller's stream has been given."""
        current = self._cuda.current_stream(self._device)
        if current != self._stream:
            self._stream.wait_stream(current)

    def join(self):
        """What the caller's stream is given from now on comes after all that it has been given."""
        current = self._cuda.current_stream(self._device)
        if current != self._stream:
            current.wait_stream(self._stream)

    def future(self):
        return torch.futures.Future(devices=[self._device])
