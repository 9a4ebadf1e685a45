# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Decodes payload formats of Cortado, written from the spec.md files and not from the C++.

    decode("cast(bf16)", payload, "fp32", rows, cols) -> the tensor's bytes

Specifications are those that `Codec::spec()` prints, with every parameter. Slow, and numpy only. What no encoder writes
raises CorruptData.
"""

import re

import numpy as np
from oracle_compso import decode_compso
from oracle_dense import decode_cast, decode_none
from oracle_floats import CorruptData, Reader, expect, narrow
from oracle_fp8 import decode_fp8, dequantise_fp8
from oracle_lowrank import decode_acp, decode_power
from oracle_quant import decode_quant, dequantise_quant
from oracle_rans import decode_codes, decode_float_rans, decode_rans
from oracle_sign import decode_sign
from oracle_sparse import decode_randk, decode_topk, places_randk, places_topk

__all__ = ["CorruptData", "DECODERS", "decode", "parse"]

# (parameters, payload, dtype, rows, cols) -> the tensor's bytes; wire ids are those of src/codec/README.md.
DECODERS = {
    "none": (1, decode_none),
    "cast": (2, decode_cast),
    "acp": (3, decode_acp),
    "power": (4, decode_power),
    "sign": (5, decode_sign),
    "topk": (6, decode_topk),
    "randk": (7, decode_randk),
    "quant": (8, decode_quant),
    "fp8": (9, decode_fp8),
    "rans": (10, decode_rans),
    "float_rans": (11, decode_float_rans),
    "compso": (12, decode_compso),
}
# In compositions. Sparsifiers: (parameters, index, elems) -> places of the kept values.
SPARSIFIERS = {"topk": places_topk, "randk": places_randk}
# Quantisers before rans: (parameters, side, codes, dtype) -> the tensor's bytes.
QUANTISERS = {"quant": dequantise_quant, "fp8": dequantise_fp8}


def decode(spec: str, payload: bytes, dtype: str, rows: int, cols: int) -> bytes:
    if rows * cols == 0:
        expect(len(payload) == 0, "an empty tensor has an empty payload")
        return b""
    stages = parse(spec)
    if len(stages) > 1:
        return decode_composition(stages, payload, dtype, rows, cols)
    return decode_stage(stages[0], payload, dtype, rows, cols)


def decode_stage(stage, payload: bytes, dtype: str, rows: int, cols: int) -> bytes:
    name, parameters = stage
    return DECODERS[name][1](parameters, payload, dtype, rows, cols)


def parse(spec: str) -> list[tuple[str, dict[str, str]]]:
    """Name and parameters of every stage."""
    return [parse_stage(text) for text in spec.split("|")]


def parse_stage(text: str) -> tuple[str, dict[str, str]]:
    """ "quant(bits=4, round=nearest)" -> ("quant", {"bits": "4", "round": "nearest"}); a value alone has the key ""."""
    name, arguments = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text).groups()
    pairs = [argument.strip().rpartition("=") for argument in (arguments or "").split(",") if argument.strip()]
    return name, {key: value for key, _, value in pairs}


def decode_composition(stages, payload: bytes, dtype: str, rows: int, cols: int) -> bytes:
    """src/codec/composition/spec.md."""
    reader = Reader(payload)
    for name, _ in stages:
        expect(reader.number("u1") == DECODERS[name][0], "stage")
        expect(reader.number("u1") == 1, "version of a stage")
    sparsifiers = [stage for stage in stages if stage[0] in SPARSIFIERS]
    rest = stages[len(sparsifiers) :] or [("none", {})]
    index_bytes = [reader.number("<u8") for _ in sparsifiers]
    side_bytes = reader.number("<u8") if len(rest) == 2 else 0

    # Places of the kept values in what each sparsifier got.
    elems, kept = rows * cols, []
    for (name, parameters), count in zip(sparsifiers, index_bytes, strict=True):
        places = SPARSIFIERS[name](parameters, reader.take(count), elems)
        kept.append((elems, places))
        elems = len(places)

    values_dtype = "fp32" if sparsifiers else dtype
    if len(rest) == 1:
        values = decode_stage(rest[0], reader.rest, values_dtype, 1, elems)
    else:
        (name, parameters), _ = rest
        side = reader.take(side_bytes)
        values = QUANTISERS[name](parameters, side, decode_codes(reader.rest, elems), values_dtype)
    if not sparsifiers:
        return values
    floats = np.frombuffer(values, "<f4")
    for before, places in reversed(kept):
        scattered = np.zeros(before, "<f4")
        scattered[places] = floats
        floats = scattered
    return narrow(floats, dtype)
