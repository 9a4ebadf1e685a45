# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The demo, the examples and the measurement of speed, each as short as can be; and what the demo's table says."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import demo
import demo_report
import train_lm

ROOT = Path(demo_report.__file__).parents[2]


def result(step_ms, losses, **more):
    return {
        "step_ms": step_ms,
        "losses": losses,
        "seconds": [step_ms / 1e3 * (step + 1) for step in range(len(losses))],
        "sent_bytes_per_step": 40_000_000,
        "payload_bytes": 1,
        "error": 0.0,
        "validation_loss": 2.5,
        "replicas_equal": True,
        **more,
    }


def record(**results):
    return {"seconds_each": 25.0, "workers": 4, "links": "200mbit", "results": results}


def test_the_demo_compares_with_ddp_the_limit_and_at_a_common_step(tmp_path):
    shown = record(
        **{
            "ddp": result(400, [5.0, 4.0, 3.0]),
            "acp(rank=4)": result(100, [5.0, 4.0, 3.0, 2.0], sent_bytes_per_step=1_000_000, error=0.75),
            "power(rank=4)": result(200, [5.0] * 12, sent_bytes_per_step=2_000_000),
            "no-communication": result(50, [5.0] * 20),
        }
    )
    lines = demo_report.result_table(shown).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line and line.split()[0] in shown["results"]}
    # step, times DDP's speed, times the limit, MB, ratio, error, steps, loss at equal time, loss at step 4
    assert rows["ddp"][1:] == ["400", "1.00x", "8.00x", "40.00", "1.0", "0.000", "3", "2.500", "-"]
    assert rows["acp(rank=4)"][1:] == ["100", "4.00x", "2.00x", "1.00", "40.0", "0.750", "4", "2.500", "3.500"]
    assert rows["no-communication"][1:] == ["50", "8.00x", "1.00x", "0", "-", "-", "20", "-", "-"]
    assert demo_report.write_picture(shown, tmp_path / "loss.png").stat().st_size > 10_000


def test_the_demo_says_when_replicas_differ_or_nothing_was_compressed():
    differ = result(100, [5.0, 4.0], replicas_equal=False)
    text = demo_report.result_table(record(**{"ddp": result(400, [5.0] * 3), "acp(rank=4)": differ}))
    assert "THE REPLICAS DIFFER after acp(rank=4)" in text
    assert "ONLY DENSE STEPS were timed for acp(rank=4)" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds-each", "nan"], "expected a number above 0"),
        (["--seconds-each", "inf"], "expected a number above 0"),
        (["--methods", "ddp; ddp-tuned"], "speed.py"),
        (["--methods", "ddp; nothing-known"], 'unknown codec "nothing-known"'),
        (["--methods", "ddp; acp(rank=none) in a loop"], "rank must be an integer"),
        (["--methods", "ddp; powersgd(rank=0)"], "powersgd(rank=0)"),
    ],
)
def test_the_demo_refuses_what_cannot_be_before_it_starts(monkeypatch, capsys, tmp_path, arguments, said):
    def start(options):
        raise AssertionError(f"started with {options}")

    monkeypatch.setattr(demo, "compare", start)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path), *arguments])
    try:
        outcome = demo.main()
    except SystemExit as ended:
        outcome = ended.code
    assert outcome and said in f"{outcome} {capsys.readouterr().err}"


@pytest.mark.parametrize("world", [2, 3, 5])  # of 4 windows: equal shares, unequal ones, and none for one rank
def test_the_validation_loss_is_the_mean_of_all_windows(monkeypatch, world):
    monkeypatch.setattr(train_lm.dist, "all_reduce", lambda tensor: None)
    data = torch.arange(1000).to(torch.uint8)
    torch.manual_seed(0)
    model = torch.nn.Embedding(train_lm.VOCABULARY, train_lm.VOCABULARY)
    parts = [train_lm.validation_loss(model, data, rank, world, windows=4) for rank in range(world)]
    assert sum(parts) == pytest.approx(train_lm.validation_loss(model, data, 0, 1, windows=4), rel=1e-5)


def run(*command):
    command = [sys.executable, *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as program:
        try:
            out, errors = program.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # its workers, too
    assert program.returncode == 0, out + errors
    return out


@pytest.mark.slow
def test_the_demo_runs(tmp_path):
    methods = "ddp;acp(rank=4);no-communication"
    short = ["--seconds-each", 3, "--workers", 2, "--rate", "1gbit", "--methods", methods, "--out", tmp_path]
    text = run("benchmarks/training/demo.py", *short)
    results = json.loads((tmp_path / "demo.json").read_text())["results"]
    assert list(results) == methods.split(";")
    assert all(f"\n{name} " in text for name in results)
    losses = results["acp(rank=4)"]["losses"]
    assert len(losses) > 2 and losses[-1] < losses[0]
    assert (tmp_path / "loss.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("program, short", [("train_digits.py", ["--epochs", 1]), ("train_lm.py", ["--steps", 4])])
def test_the_examples_train(program, short):
    text = under_torchrun(2, program, *short)
    assert "loss" in text and "ratio" in text


@pytest.mark.slow
@pytest.mark.timeout(900)  # three times four ranks
def test_the_example_of_a_sharded_model_resumes_bit_by_bit(tmp_path):
    through = under_torchrun(4, "train_fully_sharded.py", "--epochs", 3, "--folder", tmp_path / "through")
    under_torchrun(4, "train_fully_sharded.py", "--epochs", 2, "--folder", tmp_path / "begun")
    resumed = ["--epochs", 3, "--folder", tmp_path / "resumed", "--resume", tmp_path / "begun"]
    other = ["--shards", 4, *resumed]
    with pytest.raises(AssertionError, match="saved by 2 machines of 2 ranks, here are 1 of 4"):
        under_torchrun(4, "train_fully_sharded.py", *other)
    (last,) = [line for line in through.splitlines() if line.startswith("epoch  3")]
    assert last in under_torchrun(4, "train_fully_sharded.py", *resumed) and "ratio" in through
    owed = [torch.load(tmp_path / folder / "cortado_3.pt")["tensors"] for folder in ("through", "resumed")]
    torch.testing.assert_close(*owed, rtol=0, atol=0)


def under_torchrun(ranks, program, *arguments):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return run(*launch, f"examples/{program}", *arguments)


@pytest.mark.slow
def test_the_speed_of_a_method_is_measured_and_reported(tmp_path):
    names = {"ddp", "acp(rank=4)", "acp(rank=4) in a loop", "empty-hook"}
    short = ["--rounds", 1, "--discard", 0, "--timed", 1, "--workers", 2, "--out", tmp_path]
    methods = ["--models", "mlp", "--rates", "unshaped", "--methods", ";".join(names)]
    run("benchmarks/training/speed.py", *methods, *short)
    measured = json.loads((tmp_path / "speed.jsonl").read_text())
    assert measured["commit"] and set(measured["results"]) == names
    assert "| `acp(rank=4)` |" in (tmp_path / "speed.md").read_text()
