# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Decodes payload formats of Cortado, written from the spec.md files and not from the C++.

    decode("cast(bf16)", payload, "fp32", rows, cols) -> the tensor's bytes

Specifications are those that `Codec::spec()` prints, with every parameter. Slow, and numpy only. What no encoder writes
raises CorruptData.
"""

import importlib
import re

from oracle_floats import CorruptData, expect

__all__ = ["CorruptData", "decode", "knows"]

# Codec of values: decode_<name>(parameters, payload, dtype, rows, cols) -> bytes, in the module named here.
VALUES = {
    "none": "oracle_dense",
    "cast": "oracle_dense",
    "acp": "oracle_lowrank",
    "power": "oracle_lowrank",
    "sign": "oracle_sign",
}


def decode(spec: str, payload: bytes, dtype: str, rows: int, cols: int) -> bytes:
    if rows * cols == 0:
        expect(len(payload) == 0, "an empty tensor has an empty payload")
        return b""
    name, parameters = parse_stage(spec)
    decoder = getattr(importlib.import_module(VALUES[name]), f"decode_{name}")
    return decoder(parameters, payload, dtype, rows, cols)


def knows(spec: str) -> bool:
    """Whether there is a decoder of every stage here."""
    return "|" not in spec and parse_stage(spec)[0] in VALUES


def parse_stage(text: str) -> tuple[str, dict[str, str]]:
    """ "quant(bits=4, round=nearest)" -> ("quant", {"bits": "4", "round": "nearest"}); a value alone has the key ""."""
    name, arguments = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text).groups()
    pairs = [argument.strip().rpartition("=") for argument in (arguments or "").split(",") if argument.strip()]
    return name, {key: value for key, _, value in pairs}
