# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Where K-FAC computes: on the CPU, or on the CUDA device that the model is on (docs/adr/0033)."""

from dataclasses import dataclass

import torch

from .device_engine import Place, find_library
from .side_stream import address_of_current_stream, device_of

LIBRARY = "libcortado_cuda_kfac.so"  # beside _core, where it was built with nvcc and cuSOLVER
VARIABLE = "CORTADO_CUDA_KFAC_LIBRARY"  # or where this says
MOST_HELD_BYTES = 256 << 20  # of batches that the device may not have read yet


@dataclass(frozen=True)
class Held:
    """A batch that the device may not have read yet."""

    layer: int
    is_activations: bool
    values: torch.Tensor
    version: int  # of values, when they were added
    stream: int  # that has computed them, whose memory it is


def device_of_layers(layers):
    """The one device of the layers' parameters."""
    return device_of([(layer.name, parameter, None) for layer in layers for parameter in layer.parameters])


def place_of_kfac(device):
    """For layers on ``device``. A place without a library has a reason where the CPU can't take its part."""
    return find_library(LIBRARY, VARIABLE) if device.type == "cuda" else Place()


class Batches:
    """Activations and output gradients on their way into the factors.

    On a device they are read later, so they are held until the step has ended: nobody else gets their memory, and
    autograd does not add into an output gradient in place. Where too many are held, the stream that computes waits
    until they were read; no thread does. Activations that autograd does not keep as they are may be changed in place
    before: they are copied. Any other change in place is an error.
    """

    def __init__(self, core, device, *, are_read_later, on_change):
        self._core = core
        self._device = device
        self._on_change = on_change  # raises the error; takes layer and is_activations
        self.are_read_later = are_read_later
        self.forget()

    def add(self, layer, is_activations, values, dtype_code, shape, scale=1.0, *, may_change=False):
        """may_change: in place, without an error of autograd."""
        if self.are_read_later and may_change:
            values = values.clone()
        stream = address_of_current_stream(self._device)
        self._core.add_batch(layer, is_activations, values.data_ptr(), dtype_code, *shape, scale, stream)
        if not self.are_read_later:
            return
        self._held.append(Held(layer, is_activations, values, values._version, stream))
        storage = values.untyped_storage()  # a view keeps all that it is a view of
        if storage.data_ptr() not in self._storages:
            self._storages.add(storage.data_ptr())
            self.held_bytes += storage.nbytes()
        if self.held_bytes > MOST_HELD_BYTES:
            self.check()
            self.release()

    def check(self):
        """That none was changed in place: the device may have read it before or behind that."""
        for held in self._held:
            if held.values._version != held.version:
                self.release()
                self._on_change(held.layer, held.is_activations)

    def release(self):
        """What the current stream, and those that have computed them, are given from now on may overwrite them."""
        if self._held:
            streams = {held.stream: None for held in self._held} | {address_of_current_stream(self._device): None}
            for stream in streams:
                self._core.release_batches(stream)
        self.forget()

    def forget(self):
        """After a step, which has waited until they were read."""
        self._held, self._storages, self.held_bytes = [], set(), 0
