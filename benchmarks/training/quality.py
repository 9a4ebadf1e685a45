# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Final loss by method at equal steps and at equal time, over paired seeds: what compression costs.

    python benchmarks/training/quality.py
    python benchmarks/training/quality.py --methods "ddp; powersgd(rank=4); acp(rank=8)" --seeds 5

A seed fixes the initial weights and the batches, for all methods alike. Links are not shaped: only the
loss counts here. Equal time: as many steps as a method makes in the time of PowerSGD's, by the step
times that speed.jsonl has for one rate. Runs that quality.jsonl already holds for it are skipped, so an
interrupted sweep goes on where it stopped, with the steps it began with; `--again` measures all of them anew.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

from conditions import describe_machine, source_commit
from launch import WorkerFailed, run_workers
from links import Links
from methods import require_cortado
from quality_report import POWER, write_report
from records import append_record, read_records
from speed_report import key_of as speed_key

ROOT = Path(__file__).resolve().parents[2]
METHODS = [
    "ddp",
    "powersgd(rank=4)",
    "torch-acp(rank=4)",
    "power(rank=4)",
    "acp(rank=4)",
    "acp(rank=8)",
    "acp(rank=16, wire=bf16)",
    "acp(rank=1, use_error_feedback=false)",  # deliberately bad: the verdict must see it
]


def steps_at_equal_time(
    task: str, methods: list[str], steps: int, rate: str, workers: int, speed: Path
) -> dict[str, int]:
    """Steps each method makes in the time of `steps` of PowerSGD's, both of one record of as many workers on links that
    had the rate; {} where speed.jsonl does not say."""
    equal = {}
    for record in read_records(speed):
        if speed_key(record) == (task, rate, workers, "cpu", True) and POWER in record["results"]:
            step_ms = {
                name: median(b["step_ms"] for b in record["blocks"] if b["method"] == name)
                for name in record["results"]
            }
            equal.update({name: round(steps * step_ms[POWER] / ms) for name, ms in step_ms.items() if name in methods})
    return equal


def measure(task: str, methods: list[str], steps: int, options, raw: Path) -> None:
    """Trains a task by every method with every seed, except what `raw` holds already."""
    require_cortado(methods)
    wanted = [(method, seed) for seed in range(options.seeds) for method in methods]
    key = {"task_name": task, "steps": steps, "workers": options.workers, "equal_time_rate": options.rate}
    records = [record for record in read_records(raw) if all(record.get(name) == key[name] for name in key)]
    done = {(record["method"], record["seed"]) for record in records}
    runs = wanted if options.again else [run for run in wanted if run not in done]
    if len(runs) < len(wanted):
        print(f"{len(wanted) - len(runs)} of {len(wanted)} runs are in {raw.name} already (--again: measure them anew)")
    if runs:
        equal_time = steps_at_equal_time(
            task, methods, steps, options.rate, options.workers, options.out / "speed.jsonl"
        )
        if not options.again:  # whatever speed.jsonl says by now, a method has one number of steps
            known = {record["method"]: record.get("equal_time_steps") for record in records}
            equal_time |= {method: number for method, number in known.items() if number is not None}
        conditions = {"task_name": task, "workers": options.workers, "equal_time_rate": options.rate}
        train({"task": task, "runs": runs, "steps": steps, "equal_time_steps": equal_time}, conditions, raw)


def train(config: dict, conditions: dict, raw: Path) -> None:
    """Trains every (method, seed) of the runs and appends each result as it comes."""
    conditions = {
        **conditions,
        "commit": source_commit(),
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe_machine(),
    }

    def on_event(event: dict) -> None:
        kind = event.pop("event")
        name = f"{event['method']}, seed {event['seed']}"
        if kind == "progress":
            print(f"  {name}: step {event['step']}, loss {event['loss']:.3f}", flush=True)
        elif kind == "result":
            append_record(raw, {**event, **conditions})
            loss = f"training {event['training_loss']:.3f}, validation {event['validation_loss']:.3f}"
            print(f"{name}: {loss}", flush=True)

    with Links(conditions["workers"]) as links:
        conditions["links"] = links.describe()
        print(
            f"{config['task']}: {len(config['runs'])} runs of {config['steps']} steps; {links.describe()}", flush=True
        )
        run_workers(links, Path(__file__).with_name("quality_worker.py"), config, on_event, 600)


def parse_options(parser: argparse.ArgumentParser):
    """The options that `accuracy.py` has too."""
    parser.add_argument("--methods", help="separated by ';' (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--rate", default="1gbit", help="of the step times for equal time (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure runs that are there already, too")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("at least 1 seed is needed (verdicts need 3)")
    if options.methods:
        options.methods = [m.strip() for m in options.methods.split(";")]
    return options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parse_options(parser)
    if options.steps < 20:
        parser.error("at least 20 steps are needed")
    raw = options.out / "quality.jsonl"
    try:
        if not options.report_only:
            measure("gpt", options.methods or METHODS, options.steps, options, raw)
    except WorkerFailed as error:
        print(f"quality: {error}", file=sys.stderr)
        return 1
    print(f"wrote {write_report(read_records(raw), options.out / 'quality.md', 'Quality by method at equal steps')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
