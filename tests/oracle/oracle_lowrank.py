# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""src/codec/lowrank/spec.md."""

import numpy as np
from oracle_floats import Reader, expect, narrow
from oracle_philox import normals

GOLDEN_RATIO = 0x9E3779B97F4A7C15
ATTEMPTS = 4


def dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    """16 partial sums, then a tree."""
    products = np.zeros(-(-len(a) // 16) * 16, dtype=np.float32)
    products[: len(a)] = a * b
    sums = np.zeros(16, dtype=np.float32)
    for chunk in products.reshape(-1, 16):
        sums = sums + chunk
    for width in (8, 4, 2, 1):
        sums = sums[:width] + sums[width : 2 * width]
    return sums[0]


def orthonormal(v: np.ndarray, before: list[np.ndarray]) -> np.ndarray | None:
    """What is left of v beside the vectors before it, of length 1; None if that is next to nothing."""
    largest = np.max(np.abs(v))
    if not np.isfinite(largest) or largest == 0:
        return None
    v = np.ldexp(v, 1 - np.frexp(largest)[1]).astype(np.float32)
    length = np.sqrt(dot(v, v))
    for _ in range(2):
        for q in before:
            v = v - dot(q, v) * q
    rest = np.sqrt(dot(v, v))
    if not rest > np.float32(1e-5) * length:
        return None
    return (np.float32(1) / rest) * v


def basis(r: int, cols: int, seed: int, step: int, tensor: int) -> np.ndarray:
    vectors = []
    for k in range(r):
        numbers = [8 * k] + [8 * k + attempt for attempt in range(ATTEMPTS)]
        found = None
        for number in numbers if k < cols else []:
            v = normals(seed, step, (tensor + GOLDEN_RATIO * (number + 1)) % 2**64, cols)
            found = orthonormal(v, vectors)
            if found is not None:
                break
        vectors.append(np.zeros(cols, dtype=np.float32) if found is None else found)
    return np.stack(vectors)


def product(row: np.ndarray, col: np.ndarray) -> np.ndarray:
    total = row[:, :1] * col[:1]
    for k in range(1, row.shape[1]):
        total = total + row[:, k : k + 1] * col[k : k + 1]
    return total


def read_header(reader: Reader, parameters, rows: int, cols: int) -> int:
    r = min(int(parameters["rank"]), rows, cols)
    expect(reader.number("<u4") == r, "rank")
    expect(reader.number("<u4") == 0, "second word")
    return r


@np.errstate(all="ignore")
def decode_acp(parameters, payload, dtype, rows, cols):
    reader = Reader(payload)
    r = read_header(reader, parameters, rows, cols)
    seed, step, tensor = (reader.number("<u8") for _ in range(3))
    row = reader.array("<f4", rows * r).reshape(rows, r)
    reader.end()
    return narrow(product(row, basis(r, cols, seed, step, tensor)), dtype)


@np.errstate(all="ignore")
def decode_power(parameters, payload, dtype, rows, cols):
    reader = Reader(payload)
    r = read_header(reader, parameters, rows, cols)
    row = reader.array("<f4", rows * r).reshape(rows, r)
    col = reader.array("<f4", r * cols).reshape(r, cols)
    reader.end()
    return narrow(product(row, col), dtype)
