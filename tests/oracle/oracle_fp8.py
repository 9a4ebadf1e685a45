# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""src/codec/fp8/spec.md."""

import numpy as np
from oracle_floats import LARGEST, Reader, expect, narrow
from oracle_quant import block_elems, side_bytes

# exponent bits, mantissa bits, bias, the largest finite code
FORMATS = {"e4m3": (4, 3, 7, 0x7E), "e5m2": (5, 2, 15, 0x7B)}
SMALLEST_SCALE = 19
NAN_SCALE = 255


def decode_fp8(parameters, payload, dtype, rows, cols):
    reader = Reader(payload)
    side = reader.take(side_bytes(parameters, rows * cols, 1))
    codes = reader.array("u1", rows * cols)
    reader.end()
    return dequantise_fp8(parameters, side, codes, dtype)


@np.errstate(all="ignore")
def dequantise_fp8(parameters, side, codes, dtype):
    _, mantissa_bits, bias, largest_code = FORMATS[parameters[""]]
    magnitude = (codes & 0x7F).astype(np.int64)
    expect(np.all(magnitude <= largest_code), "code")
    block = block_elems(parameters, len(codes))
    expect(len(side) == -(-len(codes) // block), "bytes of the scales")
    scales = np.frombuffer(side, "u1").astype(np.int64)
    largest = number_of(largest_code, mantissa_bits, bias)
    largest_scale = next(s for s in range(-127, 255) if LARGEST[dtype] <= largest * 2.0**s) + 127
    expect(np.all((scales == NAN_SCALE) | (scales >= SMALLEST_SCALE) & (scales <= largest_scale)), "scale")
    values = np.array([number_of(m, mantissa_bits, bias) for m in range(largest_code + 1)])[magnitude]
    of_value = scales[np.arange(len(codes)) // block]
    values = np.where(of_value == NAN_SCALE, np.nan, np.ldexp(np.where(codes < 128, values, -values), of_value - 127))
    return narrow(values.astype(np.float32), dtype)


def number_of(magnitude: int, mantissa_bits: int, bias: int) -> float:
    """Exponent and mantissa as a number; exponent 0 has the denormals."""
    exponent, mantissa = magnitude >> mantissa_bits, magnitude % (1 << mantissa_bits)
    significand = mantissa + (1 << mantissa_bits if exponent > 0 else 0)
    return significand * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
