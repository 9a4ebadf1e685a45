# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Final loss by method at equal steps, over paired seeds: what compression costs in quality.

    python benchmarks/training/quality.py
    python benchmarks/training/quality.py --methods "ddp; powersgd(rank=4); acp(rank=8)" --seeds 5

A seed fixes the initial weights and the batches, for all methods alike. Runs that quality.jsonl
already holds are skipped, so an interrupted sweep goes on where it stopped; give `--out` another
folder, or delete the file, to measure again. Links are not shaped: only the loss counts here.
"""

import argparse
import sys
import time
from pathlib import Path

from conditions import describe_machine
from launch import WorkerFailed, run_workers
from links import Links
from methods import require_cortado
from quality_report import write_report
from records import append_record, read_records

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


def measure(task: str, methods: list[str], steps: int, options, raw: Path) -> None:
    """Trains a task by every method with every seed, except what `raw` holds already."""
    require_cortado(methods)
    wanted = [(method, seed) for seed in range(options.seeds) for method in methods]
    key = {"task_name": task, "steps": steps, "workers": options.workers}
    records = [record for record in read_records(raw) if all(record[name] == key[name] for name in key)]
    done = {(record["method"], record["seed"]) for record in records}
    runs = [run for run in wanted if run not in done]
    if runs:
        train(task, runs, steps, options.workers, raw)


def train(task: str, runs: list[tuple[str, int]], steps: int, workers: int, raw: Path) -> None:
    """Trains every (method, seed) and appends each result as it comes."""
    conditions = {
        "task_name": task,
        "workers": workers,
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

    with Links(workers) as links:
        conditions["links"] = links.describe()
        config = {"task": task, "runs": runs, "steps": steps}
        print(f"{task}: {len(runs)} runs of {steps} steps; {links.describe()}", flush=True)
        run_workers(links, Path(__file__).with_name("quality_worker.py"), config, on_event, 600)


def parse_options(parser: argparse.ArgumentParser):
    """The options that `accuracy.py` has too."""
    parser.add_argument("--methods", help="separated by ';' (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("at least 2 seeds are needed")
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
