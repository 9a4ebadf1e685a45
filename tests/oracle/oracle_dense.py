# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""src/codec/none/spec.md and src/codec/cast/spec.md."""

from oracle_floats import DTYPE_BYTES, expect, narrow, widen


def decode_none(parameters, payload, dtype, rows, cols):
    expect(len(payload) == rows * cols * DTYPE_BYTES[dtype], "size")
    return payload


def decode_cast(parameters, payload, dtype, rows, cols):
    expect(len(payload) == 2 * rows * cols, "size")
    wire = parameters[""]
    return payload if wire == dtype else narrow(widen(payload, wire), dtype)
