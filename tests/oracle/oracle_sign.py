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


def minus_zero(values):
    return values.view("<u4") == 0x80000000


def expect_all(conditions, text):
    expect(bool(np.all(conditions)), text)
