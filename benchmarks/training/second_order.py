# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""K-FAC against SGD and Adam, and its exchange with and without compression.

    python benchmarks/training/second_order.py                     # loss by method, three seeds; links not shaped
    python benchmarks/training/second_order.py --exchange          # time of the exchange alone, by link rate

The exchange is that of preconditioned gradients: encode, all-gather and decode, nothing else; beside it a broadcast for
each tensor, as kfac-pytorch sends them. The strategy is the same in all rows. Runs that second_order.jsonl already
holds are skipped; `--again` measures them anew.
"""

import argparse
import sys
import time
from pathlib import Path

from conditions import describe_machine, source_commit
from launch import WorkerFailed, run_workers
from links import Links
from methods import require_cortado
from records import append_record, read_records
from second_order_report import write_report

ROOT = Path(__file__).resolve().parents[2]
METHODS = [
    "sgd",
    "adam",
    "kfac",
    "kfac + compso(bound=4e-3)",
    "kfac + compso(bound=2e-2)",
    "kfac + compso(bound=1e-1)",
    "kfac + compso(error=0.5, round=dead_zone) + feedback",
    "kfac + cast(bf16)",
    "kfac + quant(bits=4)",
    "kfac + topk(density=0.01) + feedback",
]
CODECS = [
    "none",
    "compso(bound=4e-3)",
    "compso(bound=2e-2)",
    "compso(bound=1e-1)",
    "compso(error=0.5, round=dead_zone)",
    "cast(bf16)",
    "quant(bits=4)",
]
RATES = ["100mbit", "1gbit", "unshaped"]


def conditions_of(options, links: Links) -> dict:
    return {
        "task_name": options.task,
        "workers": options.workers,
        "strategy": options.strategy,
        "commit": source_commit(),
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe_machine(),
        "links": links.describe(),
        "rate": links.rate,
    }


def worker_config(options, runs: list, codecs: list[str]) -> dict:
    return {
        "task": options.task,
        "runs": runs,
        "codecs": codecs,
        "steps": options.steps,
        "exchange_steps": 20,
        "seconds": options.seconds,
        "strategy": options.strategy,
        "factor_update_steps": options.factor_update_steps,
        "inv_update_steps": options.inv_update_steps,
        "damping": options.damping,
        "skip_layers": options.skip_layers,
    }


def run(options, rate: str, runs: list, codecs: list[str], raw: Path) -> None:
    """Trains the runs, or times the exchange of the codecs, and appends each result as it comes."""
    keys = ("steps", "factor_update_steps", "inv_update_steps", "damping")
    settings = {key: getattr(options, key) for key in keys}
    with Links(options.workers, rate) as links:
        conditions = conditions_of(options, links)
        print(f"{options.task}: {len(runs)} runs, {len(codecs)} codecs; {links.describe()}", flush=True)

        def on_event(event: dict) -> None:
            kind = event.pop("event")
            if kind == "progress":
                print(f"  {event['method']}, seed {event['seed']}: step {event['step']}, loss {event['loss']:.3f}")
            elif kind == "result":
                append_record(raw, {"kind": "training", **settings, **event, **conditions})
                print(f"{event['method']}, seed {event['seed']}: validation {event['validation_loss']:.4f}", flush=True)
            elif kind == "exchange":
                append_record(raw, {"kind": "exchange", **event, **conditions})
                ratio = event["dense_bytes"] / event["payload_bytes"]
                print(f"{rate}, {event['codec']}: {event['ms']:.2f} ms, ratio {ratio:.1f} at {event['error']:.3f}")

        worker = Path(__file__).with_name("second_order_worker.py")
        run_workers(links, worker, worker_config(options, runs, codecs), on_event, 600)


def missing_runs(options, raw: Path) -> list:
    wanted = [(method, seed) for seed in range(options.seeds) for method in options.methods]
    if options.again:
        return wanted
    keys = ("steps", "workers", "strategy", "factor_update_steps", "inv_update_steps", "damping")
    done = {
        (record["method"], record["seed"])
        for record in read_records(raw)
        if record["kind"] == "training"
        and record["task_name"] == options.task
        and all(record[key] == getattr(options, key) for key in keys)
    }
    return [one for one in wanted if one not in done]


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", default="digits", help="digits, vgg-digits, resnet-digits or gpt (default: digits)")
    parser.add_argument("--methods", help="separated by ';' (default: all)")
    parser.add_argument("--exchange", action="store_true", help="time the exchange instead of training")
    parser.add_argument("--rates", default=",".join(RATES), help="of --exchange (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each codec and rate of --exchange")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--strategy", default="mem-opt", choices=["mem-opt", "dp-kfac"])
    parser.add_argument("--factor-update-steps", type=int, default=2)
    parser.add_argument("--inv-update-steps", type=int, default=10)
    parser.add_argument("--damping", type=float, default=0.003)
    parser.add_argument("--skip-layers", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--again", action="store_true", help="measure runs that are there already, too")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    options.methods = [m.strip() for m in options.methods.split(";")] if options.methods else METHODS
    return options


def main() -> int:
    options = parse_options()
    raw = options.out / "second_order.jsonl"
    try:
        if not options.report_only:
            require_cortado(["compso"])
        if options.exchange and not options.report_only:
            for rate in options.rates.split(","):
                run(options, rate, [], CODECS, raw)
        elif not options.report_only:
            runs = missing_runs(options, raw)
            if runs:
                run(options, "unshaped", runs, [], raw)
    except WorkerFailed as error:
        print(f"second_order: {error}", file=sys.stderr)
        return 1
    print(f"wrote {write_report(read_records(raw), options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
