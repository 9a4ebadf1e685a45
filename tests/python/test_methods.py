# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""benchmarks/training/methods.py: what the names of methods mean."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

from methods import Method, parse_method


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ddp", Method("ddp", "ddp", 4, None)),
        ("empty-hook", Method("empty-hook", "empty-hook", 4, None)),
        ("powersgd(rank=2)", Method("powersgd(rank=2)", "powersgd", 2, 4096)),
        ("acp(rank=8) @ 4", Method("acp(rank=8)", "acp", 8, 4.0)),
        ("sign via all_gather + checks", Method("sign", "sign", 4, None, "all_gather", True)),
        ("acp(rank=4) in a loop", Method("acp(rank=4)", "acp", 4, None, in_a_loop=True)),
        ("acp(rank=4) in a loop + checks", Method("acp(rank=4)", "acp", 4, None, checks=True, in_a_loop=True)),
    ],
)
def test_a_name_says_how_gradients_travel(name, method):
    assert parse_method(name) == method


def test_what_sends_nothing():
    silent = [name for name in ("no-communication", "empty-hook", "ddp", "none") if not parse_method(name).communicates]
    assert silent == ["no-communication", "empty-hook"]


@pytest.mark.parametrize("name", ["ddp in a loop", "acp(rank=4) @ 4 in a loop", "ddp + checks", "ddp(rank=0)", ""])
def test_what_cannot_be_is_refused(name):
    with pytest.raises(ValueError, match="method"):
        parse_method(name)
