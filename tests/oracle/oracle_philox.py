# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The random numbers of docs/wire_format.md."""

import numpy as np

LOW = np.uint64(0xFFFFFFFF)


def philox(counter, key) -> list[np.ndarray]:
    """Philox4x32-10 of four counter words (arrays or numbers below 2^32) under two key words."""
    x = [np.asarray(word, dtype=np.uint64) for word in counter]
    k = [int(word) for word in key]
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        shift = np.uint64(32)
        x = [
            product1 >> shift ^ x[1] ^ np.uint64(k[0]),
            product1 & LOW,
            product0 >> shift ^ x[3] ^ np.uint64(k[1]),
            product0 & LOW,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def key_of(seed: int, tensor: int) -> tuple[int, int]:
    words = philox((tensor % 2**32, tensor >> 32, 0, 0), (seed % 2**32, seed >> 32))
    return int(words[0]), int(words[1])


def blocks(key: tuple[int, int], step: int, count: int, first: int = 0) -> np.ndarray:
    """Words of the blocks first ... first + count - 1 of a step: count x 4, uint32."""
    number = np.arange(first, first + count, dtype=np.uint64)
    words = philox((number & LOW, number >> np.uint64(32), step % 2**32, step >> 32), key)
    return np.stack([np.broadcast_to(word, number.shape) for word in words], axis=1).astype(np.uint32)


def normals(seed: int, step: int, tensor: int, count: int) -> np.ndarray:
    words = blocks(key_of(seed, tensor), step, (count + 1) // 2).astype(np.int64)
    halves = (words & 0xFFFF) + (words >> 16)
    sums = halves[:, [0, 2]] + halves[:, [1, 3]] - 131070
    return (sums.astype(np.float32) * np.float32(2.6428998e-05)).reshape(-1)[:count]
