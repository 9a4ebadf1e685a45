# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""speed.md, quality.md and accuracy.md: which records are shown, which replace others, and what is said beside them."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

import conditions
import quality
import quality_report
import speed_report
import tables

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


def test_rows_of_the_vgg_that_died_say_so(tmp_path):
    old, new = speed_record(model="vgg", started="2026-11-24 13:00"), speed_record(model="vgg")
    said = "a method took 9 steps"  # 4 and 1 round of 2 and 3
    assert said in speed_report.write_report([old], tmp_path / "speed.md").read_text()
    assert said not in speed_report.write_report([new], tmp_path / "speed.md").read_text()


def test_equal_time_goes_by_steps_over_such_links_with_as_many_workers(tmp_path):
    records = [speed_record(100), speed_record(300, LOOPBACK), speed_record(400, workers=2)]
    path = tmp_path / "speed.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert quality.steps_at_equal_time("mlp", ["ddp"], 100, "1gbit", 4, path) == {"ddp": 50}
    assert quality.steps_at_equal_time("mlp", ["ddp"], 100, "1gbit", 3, path) == {}


def run(method, seed, loss, links="links", **more):
    return {
        "task": "a net",
        "task_name": "net",
        "steps": 300,
        "workers": 4,
        "method": method,
        "seed": seed,
        "initial_validation_loss": 5.0,
        "validation_loss": loss,
        "training_loss": loss,
        "error": 0.0,
        "sent_bytes_per_step": 1,
        "payload_bytes": 1,
        "replicas_equal": True,
        "started": "2026-12-01 10:00",
        "machine": {"cpu": "some"},
        "links": links,
        **more,
    }


@pytest.mark.parametrize(("seeds", "found"), [(2, "too few seeds"), (3, "within noise")])
def test_a_verdict_takes_three_seeds(tmp_path, seeds, found):
    runs = [run("ddp", seed, 2.0 + 0.01 * seed) for seed in range(4)]
    runs += [run("sign", seed, 2.0 + 0.01 * seed) for seed in range(seeds)]
    text = quality_report.write_report(runs, tmp_path / "quality.md", "Quality").read_text()
    assert found in next(line for line in text.splitlines() if line.startswith("| `sign`"))


def test_what_has_not_been_measured_is_listed(tmp_path):
    runs = [run("ddp", seed, 2.0) for seed in range(3)] + [run("sign", 0, 2.0, LOOPBACK)]
    wanted = {"net": ["ddp", "sign", "topk"], "other": ["ddp"]}
    text = quality_report.write_report(runs, tmp_path / "quality.md", "Quality", wanted).read_text()
    assert "Not measured yet, task `net`, 2 of 3 methods: `sign` (1 of 3 seeds), `topk`." in text
    assert "Not measured yet, task `other`, 1 of 1 methods: `ddp`." in text
    assert f"links: links; {LOOPBACK}" in text
    whole = quality_report.write_report(runs, tmp_path / "quality.md", "Quality", {"net": ["ddp"]}).read_text()
    assert "Not measured yet" not in whole


def at_equal_time(rate, steps, loss, **more):
    return {"equal_time_rate": rate, "equal_time_steps": steps, "equal_time_validation_loss": loss, **more}


def test_names_with_bars_stay_in_one_cell():
    assert tables.markdown_table(["method", "loss"], [["`topk | rans`", "0.1"], ["`a \\| b`", "-"]]).splitlines() == [
        "| method | loss |",
        "| --- | ---: |",
        "| `topk \\| rans` | 0.1 |",
        "| `a \\| b` | - |",
    ]


def test_rates_of_equal_time_have_tables_of_their_own(tmp_path):
    runs = [run("ddp", seed, 2.0, **at_equal_time("1gbit", 150, 2.5)) for seed in range(3)]
    text = quality_report.write_report(runs, tmp_path / "quality.md", "Quality").read_text()
    assert "## a net; 300 steps, 4 workers\n" in text
    runs += [run("ddp", seed, 2.0, **at_equal_time("100mbit", 20, 3.5)) for seed in range(3)]
    text = quality_report.write_report(runs, tmp_path / "quality.md", "Quality").read_text()
    for rate, steps, loss in (("1gbit", 150, "2.500"), ("100mbit", 20, "3.500")):
        table = text.partition(f"## a net; 300 steps, 4 workers, equal time at {rate}\n")[2].partition("\n## ")[0]
        assert "`ddp`, 3 seeds" in table and f"| {steps} | {loss} ± 0.000 |" in table


def test_runs_of_other_numbers_of_steps_are_no_part_of_a_mean_at_equal_time(tmp_path):
    runs = [run("ddp", seed, 2.0, **at_equal_time("1gbit", 150, 2.5)) for seed in range(3)]
    runs += [run("ddp", 0, 2.0, **at_equal_time("1gbit", 160, 2.4, started="2026-12-02 10:00"))]
    text = quality_report.write_report(runs, tmp_path / "quality.md", "Quality").read_text()
    assert "`ddp`, 3 seeds" in text and "| 160 | 2.400 |" in text


def test_runs_are_done_for_a_rate_and_go_on_with_its_steps(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(quality, "train", lambda config, conditions, raw: started.append((config, conditions)))
    monkeypatch.setattr(quality, "steps_at_equal_time", lambda *of: {"ddp": 160, "bf16": 170})
    raw = tmp_path / "quality.jsonl"
    raw.write_text(json.dumps(run("ddp", 0, 2.0, **at_equal_time("1gbit", 150, 2.5))) + "\n")
    options = SimpleNamespace(seeds=2, workers=4, rate="1gbit", again=False, out=tmp_path)
    quality.measure("net", ["ddp", "bf16"], 300, options, raw)
    options.rate = "100mbit"
    quality.measure("net", ["ddp"], 300, options, raw)
    options.rate, options.again = "1gbit", True
    quality.measure("net", ["ddp"], 300, options, raw)
    assert [config["runs"] for config, _ in started] == [
        [("bf16", 0), ("ddp", 1), ("bf16", 1)],
        [("ddp", 0), ("ddp", 1)],
        [("ddp", 0), ("ddp", 1)],
    ]
    assert [config["equal_time_steps"]["ddp"] for config, _ in started] == [150, 160, 160]
    assert started[0][0]["equal_time_steps"]["bf16"] == 170
    assert [conditions["equal_time_rate"] for _, conditions in started] == ["1gbit", "100mbit", "1gbit"]


def test_results_that_a_sweep_adds_do_not_mark_its_commit(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=some", "-c", "user.email=some@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    results, program = tmp_path / "docs" / "results" / "speed.jsonl", tmp_path / "benchmarks" / "training" / "speed.py"
    for file in (results, program, tmp_path / "README.md"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "before")
    monkeypatch.setattr(conditions, "__file__", str(program.with_name("conditions.py")))
    commit = conditions.source_commit()
    assert commit.isalnum()
    results.write_text("after")
    assert conditions.source_commit() == commit
    for file in (program, tmp_path / "README.md"):
        file.write_text("after")
        assert conditions.source_commit() == commit + "+"
        file.write_text("before")
