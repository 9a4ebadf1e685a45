# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""src/codec/compso/spec.md."""

import numpy as np
from oracle_floats import Reader, expect, narrow
from oracle_quant import NAN_BITS, read_key, reconstruct
from oracle_rans import decode_codes, decode_float_rans


@np.errstate(all="ignore")
def decode_compso(parameters, payload, dtype, rows, cols):
    if float(parameters.get("bound", "1")) == 0:
        return decode_float_rans(parameters, payload, dtype, rows, cols)
    elems = rows * cols
    block = elems if parameters["block"] == "layer" else int(parameters["block"])
    blocks = -(-elems // block)
    reader = Reader(payload)
    word = reader.number("<u8")
    leaves_out = parameters["coder"] == "rans" and elems >= 4096 and bool(word & 4)
    if leaves_out:
        word -= 4
    width, sections = (word, 1) if parameters["coder"] == "none" else (word % 256, 1 + word // 256)
    expect(width == 1 or width == 2 and may_take_two_bytes(parameters), "bytes a code")
    key = read_key(reader, parameters["round"])
    steps = reader.array("<f4", blocks)
    lawful = (steps >= 2.0**-116) & (steps <= 2.0**126)
    expect(np.all(lawful | (steps.view("<u4") == 0) | (steps.view("<u4") == NAN_BITS)), "step")
    least = reader.array("<i4", blocks).astype(np.int64)
    expect(np.all(np.abs(least) < 1 << 22), "least level")
    outwards = np.full(blocks, 0.05, np.float32)
    if parameters["round"] == "dead_zone" and "error" in parameters:
        outwards = reader.array("<f4", blocks)
        expect(np.all(np.abs(outwards) <= 1), "outwards")
    kept = read_groups(reader, elems) if leaves_out else np.ones(elems, bool)
    modulus, middle = (256, 128) if width == 1 else (65536, 32896)
    codes = np.full(elems, middle)
    codes[kept] = read_codes(reader, parameters["coder"], width, sections, int(kept.sum()))
    of_value = np.arange(elems) // block
    levels = least[of_value] + (codes - middle - least[of_value]) % modulus
    values = reconstruct(parameters["round"], levels.astype(np.float32), key, outwards[of_value])
    return narrow(values * steps[of_value], dtype)


def may_take_two_bytes(parameters) -> bool:
    if "error" in parameters:
        return True
    bound, f = float(parameters["bound"]), parameters["filter"]
    if f == "bound":
        f = "off" if parameters["round"] == "dither" else bound
    return (1 + (0 if f == "off" else float(f))) / bound + 4 > 256


def read_groups(reader: Reader, elems: int) -> np.ndarray:
    """Which values have codes: the flags of their groups stand at the end."""
    groups = -(-elems // 256)
    flag_bytes = -(-groups // 8)
    expect(len(reader.rest) >= flag_bytes, "flags of groups")
    reader.rest, flags = reader.rest[:-flag_bytes], reader.rest[-flag_bytes:]
    bits = np.unpackbits(np.frombuffer(flags, "u1"), bitorder="little")
    expect(not bits[groups:].any(), "flags behind the last group")
    return np.repeat(bits[:groups].astype(bool), 256)[:elems]


def read_codes(reader: Reader, coder: str, width: int, sections: int, elems: int) -> np.ndarray:
    """Low codes, in sections, and high ones behind them if a code has two bytes."""
    if coder == "none":
        low, high = reader.array("u1", elems), reader.array("u1", elems if width == 2 else 0)
        reader.end()
    else:
        parts, left = [], elems
        for more in reversed(range(sections)):
            count = reader.number("<u8") if more else left
            expect(0 < count < left or not more, "codes of a section")
            parts.append(decode_codes(reader.take(reader.number("<u8")), count))
            left -= count
        low = np.concatenate(parts)
        expect(width == 2 or len(reader.rest) == 0, "size")
        high = decode_codes(reader.rest, elems if width == 2 else 0)
    return low.astype(np.int64) + (256 * high.astype(np.int64) if width == 2 else 0)
