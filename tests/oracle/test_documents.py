# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worked examples of the documents, read out of them: every spec.md has a table of codec, payload and decoded."""

import re
from pathlib import Path

import numpy as np
import pytest
from oracle import CorruptData, decode, parse
from oracle_floats import narrow
from oracle_frame import decode_file, decode_frame

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted((ROOT / "src" / "codec").glob("*/spec.md"))
NUMBER = r"-?(?:\d+(?:\.\d+)?(?:e-?\d+)?|Inf)|NaN"


def cells_of(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def read_defaults() -> dict[str, dict[str, str]]:
    """Of every codec the parameters that its table, in the row "specification", shows first."""
    defaults = {"none": {}}
    for path in SPECS:
        row = next(line for line in path.read_text().splitlines() if line.startswith("| specification |"))
        for stage in re.findall(r"`(\w+\(.*?\))`", row):
            ((name, parameters),) = parse(stage)
            defaults.setdefault(name, parameters)
    return defaults


DEFAULTS = read_defaults()


def full_spec(short: str) -> str:
    """With every parameter; a value alone is that of the first one."""
    stages = []
    for name, given in parse(short.replace("\\|", "|")):
        first = next(iter(DEFAULTS[name]), "")
        parameters = DEFAULTS[name] | {key or first: value for key, value in given.items()}
        arguments = ", ".join(f"{key}={value}" if key else value for key, value in parameters.items())
        stages.append(f"{name}({arguments})")
    return " | ".join(stages)


def bytes_of(cell: str) -> bytes:
    """Everything between backticks: "`01 09` `00 × 7`"."""
    data = b""
    for piece in re.findall(r"`([^`]+)`", cell):
        hexadecimal, _, times = piece.partition("×")
        data += bytes.fromhex(hexadecimal) * int(times or 1)
    return data


def values_of(cell: str, elems: int) -> np.ndarray:
    """ "5, 3 × 31, and so on": numbers, repeated and, from the first on, repeated as a whole."""
    values = []
    for number, times in re.findall(rf"({NUMBER})(?: × (\d+))?", cell):
        values += [float(number)] * int(times or 1)
    assert len(values) == elems or cell.endswith("and so on"), f"{len(values)} values, expected {elems}: {cell}"
    return np.resize(np.array(values), elems)


def examples_of(path: Path):
    """Every row of an example: codec, tensor (the last "1 × 5, fp32" before or in the row), payload, decoded."""
    heading = tensor = None
    for line in path.read_text().partition("\n## Example\n")[2].partition("\n## ")[0].splitlines():
        tensor = re.findall(r"(\d+) × (\d+), ([a-z]+\d+)", line)[-1:] or tensor
        if line.startswith("| codec"):
            heading = cells_of(line)
        elif line.startswith("| `"):
            row = dict(zip(heading, cells_of(line), strict=True))
            yield row["codec"].strip("`"), tensor[0], row["payload"], row["decoded"]


EXAMPLES = [(path, *example) for path in SPECS for example in examples_of(path)]


def test_every_spec_has_an_example():
    assert {path for path, *_ in EXAMPLES} == set(SPECS)


@pytest.mark.parametrize(
    ("spec", "tensor", "payload", "decoded"),
    [example[1:] for example in EXAMPLES],
    ids=[f"{path.parent.name}: {spec}" for path, spec, *_ in EXAMPLES],
)
def test_examples_of_specs(spec, tensor, payload, decoded):
    rows, cols, dtype = int(tensor[0]), int(tensor[1]), tensor[2]
    values = values_of(decoded, rows * cols)
    expected = values.astype("u1").tobytes() if dtype == "uint8" else narrow(values.astype("<f4"), dtype)
    assert decode(full_spec(spec), bytes_of(payload), dtype, rows, cols) == expected


def hex_blocks(heading: str) -> list[bytes]:
    text = (ROOT / "docs" / "wire_format.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [bytes.fromhex(block) for block in re.findall(r"```\n(.+?)```", text, re.DOTALL)]


EXAMPLE_VALUES = np.array([1, -2.5, 0.5, 3], "<f4").tobytes()


def test_example_of_a_frame():
    (frame,) = hex_blocks("Frames")
    assert decode_frame("cast(bf16)", frame) == EXAMPLE_VALUES
    assert decode_frame("cast(bf16)", frame + b"another") == EXAMPLE_VALUES
    for byte in range(len(frame) - 8):
        with pytest.raises(CorruptData):
            decode_frame("cast(bf16)", frame[:byte] + bytes([frame[byte] ^ 4]) + frame[byte + 1 :])


def test_example_of_a_file():
    (file,) = hex_blocks("Files")
    assert decode_file(file) == ("fp32", [2, 2], EXAMPLE_VALUES)
    for byte in range(len(file)):
        with pytest.raises(CorruptData):
            decode_file(file[:byte] + bytes([file[byte] ^ 4]) + file[byte + 1 :])
        with pytest.raises(CorruptData):
            decode_file(file[:byte])
