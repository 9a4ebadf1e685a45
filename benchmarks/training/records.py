# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Raw results: one JSON object a line."""

import json
from pathlib import Path


def append_record(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
