# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""src/codec/topk/spec.md and src/codec/randk/spec.md."""

import math

import numpy as np
from oracle_floats import Reader, expect, narrow, widen
from oracle_philox import blocks

INDEX_HEADER_BYTES = 9
KEY_BYTES = 16


def kept_of(density: float, elems: int) -> int:
    return min(elems, max(1, math.ceil(density * elems * (1 - 2.0**-51)))) if elems else 0


def scatter(places, values, dtype, elems) -> bytes:
    output = np.zeros(elems, "<f4")
    output.view("<u4")[places] = values.view("<u4")
    return narrow(output, dtype)


# ---- topk ----


def decode_topk(parameters, payload, dtype, rows, cols):
    kept = topk_kept(parameters, payload, rows * cols)
    value_bytes = 2 if parameters["values"] == "fp16" else 4
    index_bytes = len(payload) - kept * value_bytes
    expect(index_bytes >= INDEX_HEADER_BYTES, "no room for the values")
    places = places_topk(parameters, payload[:index_bytes], rows * cols)
    return scatter(places, widen(payload[index_bytes:], parameters["values"]), dtype, rows * cols)


def topk_kept(parameters, index, elems) -> int:
    """The number of values that the header speaks of."""
    reader = Reader(index)
    kind, kept = reader.number("u1"), reader.number("<u8")
    expect(kind in {"auto": (1, 2), "delta": (1,), "bitmap": (2,)}[parameters["index"]], "kind of index")
    block = elems if parameters["block"] == "tensor" else min(elems, int(parameters["block"]))
    blocks_of = [(block, elems // block), (elems % block, 1)]
    least = [(kept_of(float(parameters["density"]), size), size, times) for size, times in blocks_of]
    most = [(min(k + k // 4, size) if parameters["select"] == "sampled" else k, times) for k, size, times in least]
    expect(sum(k * times for k, _, times in least) <= kept <= sum(k * times for k, times in most), "kept values")
    return kept


def places_topk(parameters, index, elems):
    kept = topk_kept(parameters, index, elems)
    body = np.frombuffer(index[INDEX_HEADER_BYTES:], "u1")
    if index[0] == 2:
        expect(len(body) == -(-elems // 8), "bytes of the bitmap")
        places = np.flatnonzero(np.unpackbits(body, bitorder="little"))
        expect(len(places) == kept and places[-1] < elems, "positions of the bitmap")
        return places
    b = min(range(25), key=lambda b: (kept * (b + 1) + (elems - kept >> b), b))
    low_bytes = -(-kept * b // 8)
    expect(len(body) <= low_bytes + -(-(kept + (elems - kept >> b)) // 8), "bytes of delta")
    low, upper = (np.unpackbits(part, bitorder="little") for part in (body[:low_bytes], body[low_bytes:]))
    ones = np.flatnonzero(upper)
    expect(len(ones) == kept and body[-1] != 0, "positions of delta")
    expect(not low[kept * b :].any(), "unused bits")
    lower = low[: kept * b].reshape(kept, b).astype(np.int64) @ (1 << np.arange(b, dtype=np.int64))
    gaps = (np.diff(ones, prepend=-1) - 1 << b) + lower
    places = np.cumsum(gaps + 1) - 1
    expect(places[-1] < elems, "last position")
    return places


# ---- randk ----


def decode_randk(parameters, payload, dtype, rows, cols):
    places = places_randk(parameters, payload[:KEY_BYTES], rows * cols)
    expect(len(payload) == KEY_BYTES + 4 * len(places), "bytes")
    return scatter(places, widen(payload[KEY_BYTES:], "fp32"), dtype, rows * cols)


def places_randk(parameters, key, elems):
    expect(len(key) == KEY_BYTES, "bytes of the key")
    run = min(int(parameters["block"]), elems)
    runs = -(-kept_of(float(parameters["density"]), elems) // run)
    if runs * run >= elems:
        return np.arange(elems)
    reader = Reader(key)
    words = blocks((reader.number("<u4"), reader.number("<u4")), reader.number("<u8"), 1 + -(-runs // 4))
    turn = (int(words[0][0]) + (int(words[0][1]) << 32)) * elems >> 64
    numbers = words[1:].reshape(-1)
    places = []
    for i in range(runs):
        begin, end = i * elems // runs, (i + 1) * elems // runs
        first = turn + begin + (int(numbers[i]) * (end - begin - run + 1) >> 32)
        places += [(first + j) % elems for j in range(run)]
    return np.array(places)
