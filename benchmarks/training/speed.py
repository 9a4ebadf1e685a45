# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Training step time of every method, side by side in one run: over models and links.

    python benchmarks/training/speed.py                                  # the whole sweep
    python benchmarks/training/speed.py --models gpt --rates 1gbit --rounds 5

All methods live in the same four worker processes; a round runs each for a few steps in rotation, so
that a slow spell of the machine hits all of them. Rows are appended to speed.jsonl; speed.md is made
from the latest run of each model, rate, number of workers and device (`--report-only`: made again, nothing
measured).
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

from conditions import describe_machine, source_commit
from launch import WorkerFailed, run_workers
from links import Links, parse_rate_bits_per_s, why_rates_cannot_be
from methods import DDP_FLAGS, parse_method, require_cortado
from records import append_record, read_records
from speed_report import write_report

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = "acp(rank=4, phase=global, min_compression_rate=0, start_step=0, wire=fp32)"
METHODS = [
    "no-communication",
    "ddp",
    "ddp-tuned",
    "bf16",
    "fp16",
    "powersgd(rank=1)",
    "powersgd(rank=4)",
    "powersgd-batched(rank=4)",
    "torch-acp(rank=4)",
    "none",
    "power(rank=4)",
    "acp(rank=4)",
    "acp(rank=8)",
    "acp(rank=16, wire=bf16)",
    PUBLISHED,
]


def measure(model: str, rate: str, options) -> dict:
    """One run: all methods on one model over one kind of link. Returns its record."""
    config = {
        "model": model,
        "methods": options.methods,
        "rounds": options.rounds,
        "discard": options.discard,
        "timed": options.timed,
        "warm_up_steps": 4,  # dense steps (start_step) and DDP's bucket rebuild
        "device": options.device,
    }
    record = {
        "model": model,
        "rate": rate,
        "workers": options.workers,
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "commit": source_commit(),
        "machine": describe_machine(),
        "ddp_flags": DDP_FLAGS,
        **{key: config[key] for key in ("rounds", "discard", "timed", "warm_up_steps", "device")},
        "blocks": [],
        "results": {name: {} for name in options.methods},
    }
    start = time.monotonic()

    def on_event(event: dict) -> None:
        kind, method = event.pop("event"), event.get("method", "")
        at = f"  {time.monotonic() - start:5.0f} s"
        if kind == "block":
            record["blocks"].append(event)
            print(f"{at}  round {event['round']}  {event['step_ms']:8.1f} ms  {method}", flush=True)
        elif kind in ("prepared", "result"):
            record["results"][event.pop("method")].update(event)
        elif kind == "tuned":
            record["bucket_tuning_ms"] = event["times_ms"]
        elif kind == "preparing":
            print(f"{at}  preparing {method}", flush=True)

    with Links(options.workers, rate) as links:
        record["links"] = links.describe()
        print(f"{model}, {rate}: {links.describe()}", flush=True)
        run_workers(links, Path(__file__).with_name("speed_worker.py"), config, on_event, 600)
    return record


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="gpt,mlp,vgg", help="default: %(default)s")
    parser.add_argument("--rates", default="100mbit,1gbit,unshaped", help="default: %(default)s")
    parser.add_argument("--methods", help="separated by ';' (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--discard", type=int, default=4, help="untimed steps a method and round")
    parser.add_argument("--timed", type=int, default=8, help="timed steps a method and round")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: one for all workers (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    if options.discard < 0 or options.timed < 1 or options.rounds < 1:
        parser.error("expected --discard of 0 or more, --timed and --rounds of 1 or more")
    options.models, options.rates = options.models.split(","), options.rates.split(",")
    if unknown := set(options.models) - {"gpt", "mlp", "vgg"}:
        parser.error(f"--models: {unknown.pop()!r} is none of gpt, mlp, vgg")
    chosen = options.methods.split(";") if options.methods else METHODS
    options.methods = [name.strip() for name in chosen]
    try:  # a wrong word must not end a long sweep in its middle
        for rate in options.rates:
            parse_rate_bits_per_s(rate)
        for name in options.methods:
            parse_method(name)
    except ValueError as error:
        parser.error(str(error))
    if not options.report_only and (why := why_rates_cannot_be(options.rates)):
        parser.error(why)
    return options


def main() -> int:
    options = parse_arguments()
    raw = options.out / "speed.jsonl"
    runs = [] if options.report_only else itertools.product(options.models, options.rates)
    if not options.report_only:
        require_cortado(options.methods)
    for model, rate in runs:
        try:
            append_record(raw, measure(model, rate, options))
        except WorkerFailed as error:
            print(f"{model}, {rate}: {error}", file=sys.stderr)
            return 1
        write_report(read_records(raw), options.out / "speed.md")
    print(f"wrote {write_report(read_records(raw), options.out / 'speed.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
