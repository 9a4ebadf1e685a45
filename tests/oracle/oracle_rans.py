# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""src/codec/rans/spec.md and src/codec/float_rans/spec.md."""

import numpy as np
from oracle_floats import DTYPE_BYTES, Reader, expect

LANES = 32
SLOTS = 1 << 16


def decode_rans(parameters, payload, dtype, rows, cols):
    return decode_codes(payload, rows * cols).tobytes()


def decode_codes(payload: bytes, count: int) -> np.ndarray:
    """The codes of a payload, whatever its chunk size."""
    reader = Reader(payload)
    if count == 0:
        reader.end()
        return np.zeros(0, "u1")
    mode = reader.number("u1")
    expect(mode in (0, 1, 2), "mode")
    if mode == 2:
        return decode_chunks(payload, reader, count)
    codes = reader.array("u1", count if mode == 0 else 1)
    reader.end()
    return codes if mode == 0 else np.repeat(codes, count)


def decode_chunks(payload: bytes, reader: Reader, count: int) -> np.ndarray:
    log2_codes = reader.number("u1")
    expect(12 <= log2_codes <= 18, "codes a chunk")
    frequencies = read_frequencies(reader)
    reader.take(-(len(payload) - len(reader.rest)) % 8)
    sizes = [min(1 << log2_codes, count - first) for first in range(0, count, 1 << log2_codes)]
    ends = [reader.number("<u8") for _ in sizes]
    symbols, starts = lay_out(frequencies)
    codes, begin = [], 0
    for size, end in zip(sizes, ends, strict=True):
        expect(LANES * 4 <= end - begin <= LANES * 4 + 2 * size, "bytes of a chunk")
        codes.append(decode_chunk(Reader(reader.take(end - begin)), size, frequencies, symbols, starts))
        begin = end
    reader.end()
    return np.concatenate(codes)


def read_frequencies(reader: Reader) -> np.ndarray:
    first, last = reader.number("u1"), reader.number("u1")
    expect(first < last, "symbols")
    frequencies = np.zeros(256, np.int64)
    for symbol in range(first, last + 1):
        number = reader.number("u1")
        if number >= 128:
            upper = reader.number("u1")
            expect(upper > 0, "a frequency of two bytes that one could hold")
            number = number - 128 + 128 * upper
        frequencies[symbol] = number if number < 16 else 16 * (number - 15)
    expect(frequencies[first] > 0 and frequencies[last] > 0 and sum(frequencies) == SLOTS, "frequencies")
    return frequencies


def lay_out(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The symbol of every slot, and the first slot of every symbol: rare ones come last."""
    order = sorted(range(256), key=lambda symbol: (frequencies[symbol] < 16, symbol))
    starts = np.zeros(256, np.int64)
    starts[order] = np.cumsum(frequencies[order]) - frequencies[order]
    return np.repeat(order, frequencies[order]), starts


def decode_chunk(reader: Reader, count: int, frequencies, symbols, starts) -> np.ndarray:
    states = reader.array("<u4", LANES).astype(np.int64)
    codes = np.zeros(count, "u1")
    for first in range(0, count, LANES):
        x = states[: count - first]  # a view: of the last group, as many lanes as there are codes
        slots = x % SLOTS
        s = codes[first : first + LANES] = symbols[slots]
        x[:] = frequencies[s] * (x // SLOTS) + slots - starts[s]
        hungry = x < SLOTS
        x[hungry] = SLOTS * x[hungry] + reader.array("<u2", np.count_nonzero(hungry))
    expect(np.all(states == SLOTS), "last states")
    reader.end()
    return codes


# ---- float_rans ----


def decode_float_rans(parameters, payload, dtype, rows, cols):
    elems, bits = rows * cols, 8 * DTYPE_BYTES[dtype]
    reader = Reader(payload)
    lower = reader.array("<u2", elems).astype(np.int64) if dtype == "fp32" else 0
    middle = reader.array("u1", elems).astype(np.int64)
    upper = decode_codes(reader.rest, elems).astype(np.int64)
    rotated = upper << bits - 8 | middle << bits - 16 | lower
    return (rotated >> 1 | (rotated & 1) << bits - 1).astype(f"<u{bits // 8}").tobytes()
