# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""benchmarks/training/first_order.py: one study, as short as can be. It shares what it measures with speed.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

import links as shaped

PROGRAM = Path(shaped.__file__).with_name("first_order.py")


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_a_study_is_measured_and_reported(tmp_path):
    command = [sys.executable, str(PROGRAM), "--studies", "methods-digits", "--out", str(tmp_path)]
    shortest = ["--rounds", "1", "--discard", "0", "--timed", "1"]
    subprocess.run([*command, *shortest], check=True, timeout=300)
    records = (tmp_path / "first_order.jsonl").read_text().splitlines()
    assert [json.loads(record)["study"] for record in records] == ["methods-digits"]
    assert "| `acp(rank=4)` |" in (tmp_path / "first_order.md").read_text()
