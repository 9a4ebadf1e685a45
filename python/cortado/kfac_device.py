# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Where K-FAC computes: on the CPU, or on the CUDA device that the model is on (docs/adr/0033)."""

from .device_engine import Place, find_library
from .side_stream import address_of_current_stream, device_of

LIBRARY = "libcortado_cuda_kfac.so"  # beside _core, where it was built with nvcc and cuSOLVER
VARIABLE = "CORTADO_CUDA_KFAC_LIBRARY"  # or where this says
MOST_HELD_BYTES = 256 << 20  # of batches that the device may not have read yet


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
    until they were read; no thread does.
    """

    def __init__(self, core, device, *, are_read_later):
        self._core = core
        self._device = device
        self.are_read_later = are_read_later
        self._held, self._held_bytes = [], 0

    def add(self, layer, is_activations, values, dtype_code, shape, scale=1.0):
        stream = address_of_current_stream(self._device)
        self._core.add_batch(layer, is_activations, values.data_ptr(), dtype_code, *shape, scale, stream)
        if not self.are_read_later:
            return
        self._held.append(values)
        self._held_bytes += values.numel() * values.element_size()
        if self._held_bytes > MOST_HELD_BYTES:
            self.release()

    def release(self):
        """What the current stream is given from now on may overwrite them."""
        if self._held:
            self._core.release_batches(address_of_current_stream(self._device))
        self.forget()

    def forget(self):
        """After a step, which has waited until they were read."""
        self._held, self._held_bytes = [], 0
