# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""src/codec/sign/spec.md."""

import numpy as np
from oracle_floats import Reader, expect, narrow


def decode_sign(parameters, payload, dtype, rows, cols):
    elems = rows * cols
    reader = Reader(payload)
    block = elems if parameters["block"] == "tensor" else int(parameters["block"])
    blocks = -(-elems // block)
    two_means = parameters["scale"] == "two_means"
    scales = reader.array("<f4", 2 * blocks if two_means else blocks)
    bits = np.unpackbits(reader.array("u1", -(-elems // 8)), bitorder="little")
    reader.end()
    expect(not bits[elems:].any(), "unused bits")
    plain_nan = scales.view("<u4") == 0x7FC00000
    if parameters["scale"] == "none":
        expect_all(plain_nan | (scales == 1), "scale")
    positive, negative = (scales[::2], scales[1::2]) if two_means else (scales, scales)
    expect_all(plain_nan[:: 2 if two_means else 1] | (positive >= 0) & ~minus_zero(positive), "positive scale")
    if two_means:
        expect_all(plain_nan[1::2] | (negative <= 0) & ~minus_zero(negative), "negative scale")
    else:
        negative = -scales
    of_value = np.arange(elems) // block
    return narrow(np.where(bits[:elems] == 1, negative[of_value], positive[of_value]), dtype)


def encode_mean_abs(values):
    """The payload of sign(scale=mean_abs, block=tensor) for float32 values."""
    mean = block_sum(np.abs(values.astype(np.float64))) / len(values)
    return np.float32(mean).tobytes() + np.packbits(values < 0, bitorder="little").tobytes()


def block_sum(values, part=1024, lanes=16, sums=256):
    """In the order of the specification; other numbers are other orders."""
    rows = in_rows(in_rows(values, part).ravel(), lanes).reshape(-1, part // lanes, lanes)
    of_parts = halve(add_in_order(rows.swapaxes(0, 1)).T)
    return halve(add_in_order(in_rows(of_parts, sums)))


def in_rows(values, length):
    """Zeros behind the last ones, which change no sum."""
    padded = np.zeros(-(-len(values) // length) * length)
    padded[: len(values)] = values
    return padded.reshape(-1, length)


def add_in_order(rows):
    total = np.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def halve(sums):
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


def minus_zero(values):
    return values.view("<u4") == 0x80000000


def expect_all(conditions, text):
    expect(bool(np.all(conditions)), text)
