# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Decodes payload formats of Cortado, written from the spec.md files and not from the C++.

    decode("cast(bf16)", payload, "fp32", rows, cols) -> the tensor's bytes

Specifications are those that `Codec::spec()` prints, with every parameter. Slow, and numpy only. What no encoder writes
raises CorruptData.
"""

import importlib
import re

import numpy as np
from oracle_floats import CorruptData, Reader, expect, narrow

__all__ = ["CorruptData", "decode", "knows"]

WIRE_IDS = {"none": 1, "cast": 2, "acp": 3, "power": 4, "sign": 5, "topk": 6, "randk": 7}

# Codec of values: decode_<name>(parameters, payload, dtype, rows, cols) -> bytes, in the module named here.
VALUES = {
    "none": "oracle_dense",
    "cast": "oracle_dense",
    "acp": "oracle_lowrank",
    "power": "oracle_lowrank",
    "sign": "oracle_sign",
    "topk": "oracle_sparse",
    "randk": "oracle_sparse",
}
# First stages of compositions, in the same modules: places_<name>(parameters, index, elems) -> places.
SPARSIFIERS = {"topk": "oracle_sparse", "randk": "oracle_sparse"}


def decode(spec: str, payload: bytes, dtype: str, rows: int, cols: int) -> bytes:
    if rows * cols == 0:
        expect(len(payload) == 0, "an empty tensor has an empty payload")
        return b""
    stages = [parse_stage(text) for text in spec.split("|")]
    if len(stages) > 1:
        return decode_composition(stages, payload, dtype, rows, cols)
    name, parameters = stages[0]
    return function("decode", VALUES, name)(parameters, payload, dtype, rows, cols)


def knows(spec: str) -> bool:
    """Whether there is a decoder of every stage here."""
    names = [parse_stage(text)[0] for text in spec.split("|")]
    return all(name in SPARSIFIERS for name in names[:-1]) and names[-1] in VALUES


def parse_stage(text: str) -> tuple[str, dict[str, str]]:
    """ "quant(bits=4, round=nearest)" -> ("quant", {"bits": "4", "round": "nearest"}); a value alone has the key ""."""
    name, arguments = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text).groups()
    pairs = [argument.strip().rpartition("=") for argument in (arguments or "").split(",") if argument.strip()]
    return name, {key: value for key, _, value in pairs}


def stage_text(stage: tuple[str, dict[str, str]]) -> str:
    name, parameters = stage
    return f"{name}({', '.join(f'{key}={value}' if key else value for key, value in parameters.items())})"


def function(kind: str, modules: dict[str, str], name: str):
    return getattr(importlib.import_module(modules[name]), f"{kind}_{name}")


def decode_composition(stages, payload: bytes, dtype: str, rows: int, cols: int) -> bytes:
    """src/codec/composition/spec.md."""
    reader = Reader(payload)
    for name, _ in stages:
        expect(reader.number("u1") == WIRE_IDS[name], "stage")
        expect(reader.number("u1") == 1, "version of a stage")
    sparsifiers = [stage for stage in stages if stage[0] in SPARSIFIERS]
    rest = stages[len(sparsifiers) :]
    index_bytes = [reader.number("<u8") for _ in sparsifiers]

    # Places of the kept values in what each sparsifier got.
    elems, kept = rows * cols, []
    for (name, parameters), count in zip(sparsifiers, index_bytes, strict=True):
        index = reader.take(count)
        places = np.zeros(0, np.int64)
        if elems == 0:
            expect(not index, "an index of no values")
        else:
            places = function("places", SPARSIFIERS, name)(parameters, index, elems)
        kept.append((elems, places))
        elems = len(places)

    values = decode(stage_text(rest[0]) if rest else "none", reader.rest, "fp32", 1, elems)
    floats = np.frombuffer(values, "<f4")
    for before, places in reversed(kept):
        scattered = np.zeros(before, "<f4")
        scattered[places] = floats
        floats = scattered
    return narrow(floats, dtype)
