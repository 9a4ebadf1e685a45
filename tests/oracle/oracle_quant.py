# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""src/codec/quant/spec.md."""

import numpy as np
from oracle_floats import LARGEST, Reader, expect, narrow
from oracle_philox import blocks

LANES = 16
GROUP = 128
NAN_BITS = 0x7FC00000


def block_elems(parameters, elems: int) -> int:
    return elems if parameters["block"] == "tensor" else int(parameters["block"])


def side_bytes(parameters, elems: int, bytes_a_block: int) -> int:
    return bytes_a_block * -(-elems // block_elems(parameters, elems))


def decode_quant(parameters, payload, dtype, rows, cols):
    elems = rows * cols
    reader = Reader(payload)
    side = reader.take((16 if parameters["round"] == "dither" else 0) + side_bytes(parameters, elems, 4))
    return dequantise_quant(parameters, side, unpack(reader, elems, int(parameters["bits"])), dtype)


def unpack(reader: Reader, elems: int, bits: int) -> np.ndarray:
    """Codes from groups of 16 lanes, then from one stream of bits; the reader must end with them."""
    groups, behind = divmod(elems, GROUP)
    lanes = reader.array("u1", groups * LANES * bits).reshape(groups, bits, LANES).transpose(0, 2, 1)
    grouped = numbers(np.unpackbits(lanes, axis=2, bitorder="little").reshape(groups, LANES, GROUP // LANES, bits))
    stream = np.unpackbits(reader.array("u1", -(-behind * bits // 8)), bitorder="little")
    reader.end()
    expect(not stream[behind * bits :].any(), "unused bits")
    last = numbers(stream[: behind * bits].reshape(behind, bits))
    return np.concatenate([grouped.transpose(0, 2, 1).reshape(-1), last])


def numbers(bits: np.ndarray) -> np.ndarray:
    """Numbers from their bits on the last axis, the lowest first."""
    return bits.astype(np.int64) @ (1 << np.arange(bits.shape[-1]))


@np.errstate(all="ignore")
def dequantise_quant(parameters, side, codes, dtype):
    reader = Reader(side)
    key = read_key(reader, parameters["round"])
    block = block_elems(parameters, len(codes))
    steps = reader.array("<f4", -(-len(codes) // block))
    reader.end()
    lawful = (steps >= 2.0**-116) & (steps <= LARGEST[dtype])
    expect(np.all(lawful | (steps.view("<u4") == 0) | (steps.view("<u4") == NAN_BITS)), "step")
    largest_level = np.float32(2.0 ** (int(parameters["bits"]) - 1) - 1 if parameters["bits"] != "1" else 0.5)
    expect(np.all(codes <= 2 * largest_level), "code")
    levels = codes.astype(np.float32) - largest_level
    return narrow(reconstruct(parameters["round"], levels, key) * steps[np.arange(len(codes)) // block], dtype)


def read_key(reader: Reader, rounding: str):
    """Of the random numbers: two words and the step, which only dither sends."""
    return (reader.number("<u4"), reader.number("<u4"), reader.number("<u8")) if rounding == "dither" else None


def reconstruct(rounding: str, levels: np.ndarray, key, outwards: float | np.ndarray = 0.05) -> np.ndarray:
    """What a level stands for, in steps."""
    if rounding == "dead_zone":
        return levels + np.float32(outwards) * np.sign(levels)
    return levels - dither(*key, len(levels)) if rounding == "dither" else levels


def dither(key0: int, key1: int, step: int, elems: int) -> np.ndarray:
    """u of every value: 16 x 16 values share 16 blocks, a lane's 16 values one of them."""
    tiles = -(-elems // 256)
    words = blocks((key0, key1), step, LANES * tiles)  # tile and lane, word
    random = words.astype("<u4").view("u1").reshape(tiles, LANES, 16).transpose(0, 2, 1).reshape(-1)[:elems]
    return ((random + 0.5) / 256 - 0.5).astype(np.float32)
