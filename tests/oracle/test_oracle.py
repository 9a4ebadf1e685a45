# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The golden payloads, read by decoders that were written from the documents alone."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from oracle import DECODERS, CorruptData, decode, parse
from oracle_frame import fnv1a_64
from oracle_philox import normals
from oracle_sign import block_sum, encode_mean_abs

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "payloads.jsonl"
SIGN_SUMS = GOLDEN.parent / "sign_sums.json"


def read_golden() -> tuple[dict, dict]:
    inputs, cases = {}, defaultdict(list)
    for line in map(json.loads, GOLDEN.read_text().splitlines()):
        if "name" in line:
            inputs[line["name"]] = line
        else:
            cases[line["codec"]].append(line)
    return inputs, cases


INPUTS, CASES = read_golden()


def damage(payload: bytes, how: str) -> bytes:
    kind, number, *value = how.split()
    number = int(number)
    if kind == "set":
        return payload[:number] + bytes([int(value[0])]) + payload[number + 1 :]
    if kind == "cut":
        return payload[:number]
    if kind == "append":
        return payload + bytes([number])
    flipped = bytearray(payload)
    flipped[number // 8] ^= 1 << number % 8
    return bytes(flipped)


def outcome(spec: str, payload: bytes, name: str) -> str:
    shape = INPUTS[name]
    try:
        return f"{fnv1a_64(decode(spec, payload, shape['dtype'], shape['rows'], shape['cols'])):016x}"
    except CorruptData:
        return "corrupt data"


def test_every_codec_has_golden_errors():
    refused = {
        name
        for spec, cases in CASES.items()
        for name, _ in parse(spec)
        if sum(text.startswith("corrupt data: ") for case in cases for text in case["damaged"].values()) > 3
    }
    assert refused == set(DECODERS)


@pytest.mark.parametrize("spec", CASES)
def test_payloads_mean_the_same(spec):
    for case in CASES[spec]:
        payload = bytes.fromhex(case["payload"])
        assert outcome(spec, payload, case["input"]) == case["decoded"], case["input"]
        for how, expected in case["damaged"].items():
            got = outcome(spec, damage(payload, how), case["input"])
            assert got == expected.partition(":")[0], f"{case['input']}, {how}: {expected}"


def test_sign_adds_up_in_the_order_of_its_specification():
    golden = json.loads(SIGN_SUMS.read_text())
    elems, skip, at = golden["elems"], golden["skip"], golden["set_at"]
    values = np.ldexp(normals(golden["seed"], 0, 0, skip + elems)[skip:], np.arange(elems) % 32).astype("<f4")
    values[at : at + 3] = np.frombuffer(bytes.fromhex(golden["set"]), "<f4")
    payload = encode_mean_abs(values)
    assert payload[:4].hex() == golden["scale"]
    assert f"{fnv1a_64(payload):016x}" == golden["payload_hash"]
    # Shorter and longer parts, fewer lanes, fewer and more sums, no parts, and one after the other.
    magnitudes = np.abs(values.astype(np.float64))
    others = [{"part": 512}, {"part": 2048}, {"lanes": 8}, {"sums": 128}, {"sums": 1024}, {"part": 2**20, "sums": 1}]
    for order in [*others, {"part": 1, "lanes": 1, "sums": 1}]:
        mean = np.float32(block_sum(magnitudes, **order) / elems)
        assert mean.tobytes().hex() != golden["scale"], order
