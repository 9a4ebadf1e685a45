# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""speed.md, quality.md and accuracy.md: which records are shown, which replace others, and what is said beside them."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

import quality
import speed_report

LOOPBACK = "loopback, NOT shaped (network namespaces need root; 1gbit was asked for)"


def speed_record(step_ms=100, links="links", model="mlp", **more):
    methods = {"ddp": step_ms, "powersgd(rank=4)": step_ms / 2}
    return {
        "model": model,
        "rate": "1gbit",
        "workers": 4,
        "started": "2026-12-01 10:00",
        "machine": {"cpu": "some"},
        "links": links,
        "ddp_flags": {},
        **{"rounds": 1, "discard": 2, "timed": 3, "warm_up_steps": 4},
        "blocks": [
            {"method": name, "round": 0, "step_ms": ms, "sent_bytes_per_step": 1_000_000}
            for name, ms in methods.items()
        ],
        "results": {name: {"timed": 3, "discard": 2, "error": 0.0} for name in methods},
        **more,
    }


def test_speed_of_other_links_workers_or_devices_replaces_nothing(tmp_path):
    shaped = speed_record(101)
    others = [speed_record(102, LOOPBACK), speed_record(103, workers=2), speed_record(104, device="cuda")]
    text = speed_report.write_report([shaped, *others], tmp_path / "speed.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## mlp, 1gbit",
        "## mlp, 1gbit, loopback",
        "## mlp, 1gbit, 2 workers",
        "## mlp, 1gbit, cuda",
    ]
    assert all(f"| `ddp` | {ms}.0 |" in text for ms in (101, 102, 103, 104))
    # A record from before devices were written down is of the CPU.
    text = speed_report.write_report([shaped, speed_record(105, device="cpu")], tmp_path / "speed.md").read_text()
    assert "| `ddp` | 101.0 |" not in text and "| `ddp` | 105.0 |" in text


def test_equal_time_goes_by_steps_over_such_links_with_as_many_workers(tmp_path):
    records = [speed_record(100), speed_record(300, LOOPBACK), speed_record(400, workers=2)]
    path = tmp_path / "speed.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert quality.steps_at_equal_time("mlp", ["ddp"], 100, "1gbit", 4, path) == {"ddp": 50}
    assert quality.steps_at_equal_time("mlp", ["ddp"], 100, "1gbit", 3, path) == {}
