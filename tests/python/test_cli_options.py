# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""`cortado options` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).parent / "cortado"


def options(*arguments):
    return subprocess.run([PROGRAM, "options", *arguments], check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ((), 4341),
        (("--levels", "2"), 4341),
        (("--device", "gpu"), 174),
        (("--device", "gpu", "--no-rooted"), 54),
        (("--no-rooted",), 1188),
        (("--levels", "1"), 63),
        (("--levels", "3"), 294_993),
        (("--levels", "4", "--allow", "none"), 232_468_629),
        (("--allow", "topk(density=0.01)"), 4341),
        (("--allow", "topk(density=0.01)", "--allow", "sign"), 2 * 4341 - 9),
    ],
)
def test_counts(arguments, count):
    done = options("--count", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{count}\n", "")


def test_linear_codecs_have_sums_of_payloads_too():
    lines = options("--levels", "1", "--device", "cpu", "--allow", "cast(bf16)").stdout.splitlines()
    assert "cast(bf16): encode@cpu all_reduce@all decode@cpu" in lines
    assert "all_reduce@all" in lines
    assert len(lines) == len(set(lines))


def test_lists_one_option_a_line():
    lines = options("--device", "gpu", "--no-rooted").stdout.splitlines()
    assert len(lines) == 54
    assert lines[0] == "all_reduce@flat"
    assert "encode@gpu all_to_all@intra all_gather@inter all_gather@intra decode@gpu" in lines


def test_json_is_what_plans_have():
    rows = [json.loads(line) for line in options("--json", "--levels", "1", "--device", "cpu").stdout.splitlines()]
    assert rows[0] == {"option": [{"op": "all_reduce", "levels": ["all"]}], "encodes": 0, "text": "all_reduce@all"}
    assert {"op": "encode", "device": "cpu"} in rows[-1]["option"]
    assert json.loads(options("--json", "--count").stdout) == {"count": 4341}


def test_help_has_examples():
    text = options("--help").stdout
    assert "cortado options --count" in text and "mpirun" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--levels", "0"), "--levels"),
        (("--levels", "5"), "--levels"),
        (("--device", "tpu"), "--device"),
        (("--allow", "nnoe"), 'unknown codec "nnoe"'),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments, message):
    done = options(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
