# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Floats of 16 and 32 bits (src/codec/cast/spec.md), bytes as little-endian arrays, and the error of all decoders."""

import numpy as np

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "uint8": 1}
# The largest finite values.
LARGEST = {"fp32": (2 - 2.0**-23) * 2.0**127, "fp16": 65504.0, "bf16": (2 - 2.0**-7) * 2.0**127}


class CorruptData(Exception):
    pass


def expect(condition, text: str) -> None:
    if not condition:
        raise CorruptData(text)


class Reader:
    """Takes fields off the front of some bytes."""

    def __init__(self, data: bytes):
        self.rest = data

    def take(self, count: int) -> bytes:
        expect(0 <= count <= len(self.rest), f"{count} bytes expected, {len(self.rest)} are left")
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def array(self, dtype: str, count: int = 1) -> np.ndarray:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype=dtype)

    def number(self, dtype: str):
        """One integer as a Python int, one float as a numpy float32."""
        value = self.array(dtype)[0]
        return int(value) if np.issubdtype(value.dtype, np.integer) else value

    def end(self) -> None:
        expect(not self.rest, f"{len(self.rest)} bytes too many")


def widen(data: bytes, dtype: str) -> np.ndarray:
    """Floats of any dtype as float32; NaN of fp16 become quiet."""
    if dtype == "fp32":
        return np.frombuffer(data, "<f4")
    bits = np.frombuffer(data, "<u2").astype(np.uint32)
    if dtype == "bf16":
        return (bits << 16).view(np.float32)
    values = np.frombuffer(data, "<f2").astype(np.float32).view(np.uint32)
    nan = (bits & 0x7FFF) > 0x7C00
    quiet = (bits & 0x8000) << 16 | 0x7FC00000 | (bits & 0x3FF) << 13
    return np.where(nan, quiet, values).astype(np.uint32).view(np.float32)


def narrow(values: np.ndarray, dtype: str) -> bytes:
    """float32 in a dtype: nearest, ties to even, NaN quiet with their upper bits."""
    values = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "fp32":
        return values.tobytes()
    bits = values.view(np.uint32).astype(np.uint64)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if dtype == "bf16":
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        quiet = bits >> 16 | 0x40
    else:
        with np.errstate(over="ignore"):
            rounded = values.astype("<f2").view(np.uint16).astype(np.uint64)
        quiet = bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x1FF
    return np.where(nan, quiet, rounded).astype("<u2").tobytes()
