# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The program `cortado` as a user meets it: output, error texts, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).parent / "cortado"


def cortado(*arguments, **options):
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([PROGRAM, *arguments], check=False, **options)


def test_help_teaches_with_examples():
    done = cortado("--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert "cortado codec list --json" in done.stdout


def test_version_is_that_of_the_header():
    header = Path(__file__).parents[2] / "include/cortado/version.h"
    parts = [line.split()[2] for line in header.read_text().splitlines() if line.startswith("#define CORTADO_VERSION_")]
    assert cortado("--version").stdout.strip() == "cortado " + ".".join(parts)


def test_list_names_codecs_parameters_and_ranges():
    done = cortado("codec", "list")
    assert done.returncode == 0
    assert "none" in done.stdout
    assert "dtype=bf16  (bf16 or fp16)" in done.stdout


def test_the_documented_list_is_the_registry():
    """docs/codecs.txt; made again with: .venv/bin/cortado codec list > docs/codecs.txt"""
    documented = Path(__file__).parents[2] / "docs" / "codecs.txt"
    assert cortado("codec", "list").stdout == documented.read_text()


def test_list_as_json_has_one_object_a_line():
    lines = cortado("codec", "list", "--json").stdout.splitlines()
    rows = {row["name"]: row for row in map(json.loads, lines)}
    assert list(rows)[:2] == ["none", "cast"]
    assert rows["none"]["traits"] == ["lossless", "unbiased", "linear", "divisible", "fixed_size", "elementwise"]
    (dtype,) = rows["cast"]["parameters"]
    assert dtype["default"] == "bf16"
    assert dtype["choices"] == ["bf16", "fp16"]


@pytest.mark.parametrize(
    ("spec", "form"),
    [
        ("none", "none"),
        (" cast ( fp16 ) ", "cast(fp16)"),
        ("cast", "cast(bf16)"),
        ("cast(dtype=bf16)", "cast(bf16)"),
        (" auto( safe )", "auto(quality=safe)"),
    ],
)
def test_check_prints_the_canonical_form(spec, form):
    done = cortado("codec", "check", spec)
    assert (done.returncode, done.stdout, done.stderr) == (0, form + "\n", "")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cast(fp8)", 'cast(fp8): dtype must be bf16 or fp16, got "fp8"'),
        ("auto(quality=best)", "quality must be safe, balanced or aggressive"),
        ("cast(", '"cast(": position 6: expected a parameter or a value, got the end'),
        ("nnoe", 'unknown codec "nnoe"; known are none, cast'),
        ("", '"": position 1: expected a codec name, got the end'),
    ],
)
def test_check_says_what_is_wrong_and_exits_with_2(spec, message):
    done = cortado("codec", "check", spec)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr


@pytest.mark.parametrize(
    "arguments", [(), ("codec",), ("codec", "lisst"), ("codec", "check"), ("codec", "list", "--j")]
)
def test_a_wrong_command_line_exits_with_2(arguments):
    done = cortado(*arguments)
    assert done.returncode == 2
    assert done.stderr != ""


def test_a_misspelt_command_is_named():
    assert "lisst" in cortado("codec", "lisst").stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error():
    with open("/dev/full", "w") as full:
        done = cortado("codec", "list", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "standard output" in done.stderr
