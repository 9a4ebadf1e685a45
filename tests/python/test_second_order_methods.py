# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""benchmarks/training/second_order_methods.py: what the names of methods mean."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

from second_order_methods import parse_method


def test_a_codec_stands_for_all_steps():
    method = parse_method("kfac + compso(bound=2e-2) + feedback")
    assert (method.host, method.compression(), method.feedback) == ("kfac", "compso(bound=2e-2)", True)
    assert parse_method("kfac").compression() == "none"


def test_a_schedule_gives_each_step_its_codec():
    method = parse_method("kfac + compso(bound=1e-1, filter=off) to step 80, compso(bound=2e-2) + feedback")
    codec_of = method.compression()
    assert [codec_of(step) for step in (0, 79)] == ["compso(bound=1e-1, filter=off)"] * 2
    assert [codec_of(step) for step in (80, 1000)] == ["compso(bound=2e-2)"] * 2
    assert method.feedback


@pytest.mark.parametrize("name", ["sdg", "sgd + cast(bf16)", "kfac + quant(bits=4) + quant(bits=8)"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="method"):
        parse_method(name)
