# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Is `auto` as fast as the best that its quality level allows, and does it predict what it measures?

    python benchmarks/training/auto.py                                     # the whole sweep, or what is left of it
    python benchmarks/training/auto.py --models mlp --rates 1gbit --workers 4
    python benchmarks/training/auto.py --predictions                       # auto alone: what it predicts and measures
    python benchmarks/training/auto.py --report-only                       # auto.md and its pictures, nothing measured

One cell of the sweep is a model on links of a rate with a number of workers. In each, auto decides first (those steps
are reported apart). Then all rivals, going on from its weights, are measured in rotation, and the fastest of them is
chosen; then auto and that rival are measured again, in alternation, both from the weights that auto has. A cell that is
done is appended to auto.jsonl and not measured again unless asked to (`--again`), so the sweep can be interrupted, and
goes on where it was. The page takes the rounds of all runs of a cell together.

With `--predictions` a cell ends when auto has decided, a third of the time: auto_predictions.md, .jsonl.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

from auto_predictions_report import write_predictions
from auto_report import MODELS, QUALITIES, RATES, WORKERS, key_of, measured, write_report
from conditions import describe_machine, source_commit
from launch import WorkerFailed, run_workers
from links import LOOPBACK, Links, parse_rate_bits_per_s, why_not_shaped, why_rates_cannot_be
from methods import DDP_FLAGS, require_cortado
from records import append_record, read_records

ROOT = Path(__file__).resolve().parents[2]
POWERSGD = [f"powersgd(rank={rank})" for rank in (1, 2, 4)]
IDLE_S = 600


def rivals_of(quality: str) -> list[str]:
    from cortado import _core

    allowed = QUALITIES[: QUALITIES.index(quality) + 1]
    fixed = [spec for spec, least, _ in _core.auto_settings() if least in allowed]
    return ["ddp", "bf16", *fixed, *(POWERSGD if quality == "aggressive" else [])]


def measure(model: str, rate: str, workers: int, options) -> dict:
    config = {
        "model": model,
        "auto": f"auto(quality={options.quality})",
        "rivals": [] if options.predictions else rivals_of(options.quality),
        "choosing_rounds": options.choosing_rounds,
        "rounds": options.rounds,
        "timed": options.timed,
        "seconds": options.seconds,
    }
    record = {
        **config,
        "rate": rate,
        "workers": workers,
        "quality": options.quality,
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "commit": source_commit(),
        "machine": describe_machine(),
        "ddp_flags": DDP_FLAGS,
        "blocks": [],
    }
    start = time.monotonic()

    def on_event(event: dict) -> None:
        kind = event.pop("event")
        at = f"  {time.monotonic() - start:5.0f} s"
        if kind == "block":
            record["blocks"].append(event)
            print(f"{at}  {event['set']} {event['round']}  {event['step_ms']:8.1f} ms  {event['method']}", flush=True)
        elif kind == "decided":
            record["decided"] = event
            print(f"{at}  {event['decision']['reason']}", flush=True)
        elif kind == "rival":
            record["rival"] = event
        elif kind == "result":
            record["result"] = event
        elif kind == "preparing":
            print(f"{at}  preparing {event['method']}", flush=True)

    with Links(workers, rate) as links:
        record["links"] = links.describe()
        print(f"{model}, {rate}, {workers} workers: {links.describe()}", flush=True)
        run_workers(links, Path(__file__).with_name("auto_worker.py"), config, on_event, IDLE_S)
    record["took_s"] = round(time.monotonic() - start)
    return record


def failure(model: str, rate: str, workers: int, quality: str, error: WorkerFailed) -> dict:
    """What the page says of a cell that has no result."""
    return {
        "model": model,
        "rate": rate,
        "workers": workers,
        "quality": quality,
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "commit": source_commit(),
        "links": Links(workers, rate).describe(),
        "failed": " ".join(str(error).split())[:300],
    }


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--rates", default=",".join(RATES), help="default: %(default)s")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)), help="default: %(default)s")
    parser.add_argument("--quality", default="balanced", choices=QUALITIES)
    parser.add_argument(
        "--seconds", type=float, default=60, help="about what timing all rivals and auto takes; default: %(default)s"
    )
    parser.add_argument("--choosing-rounds", type=int, default=3, help="to choose the rival in; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--timed", type=int, default=12, help="most timed steps a method and round")
    parser.add_argument("--again", action="store_true", help="measure cells that the .jsonl has, too; both runs count")
    parser.add_argument("--predictions", action="store_true", help="let auto decide, and measure no rivals")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    options.models, options.rates = options.models.split(","), options.rates.split(",")
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"--models: {unknown.pop()!r} is none of {', '.join(MODELS)}")
    try:
        options.workers = [int(count) for count in options.workers.split(",")]
        for rate in options.rates:
            parse_rate_bits_per_s(rate)
    except ValueError as error:
        parser.error(str(error))
    if min(options.choosing_rounds, options.rounds) < 1:
        parser.error("expected --choosing-rounds and --rounds of 1 or more")
    if not options.report_only and (why := why_rates_cannot_be(options.rates)):
        parser.error(why)
    return options


def main() -> int:
    options = parse_arguments()
    raw = options.out / ("auto_predictions.jsonl" if options.predictions else "auto.jsonl")
    failed = []
    if not options.report_only:
        require_cortado(["auto"])
        known = set() if options.again else {key_of(record) for record in measured(read_records(raw))}
        cells = list(itertools.product(options.models, options.rates, options.workers))
        where = () if why_not_shaped() is None else (LOOPBACK,)
        left = [cell for cell in cells if (options.quality, *cell, *where) not in known]
        print(f"{len(left)} of {len(cells)} cells to measure", flush=True)
        for cell in left:
            try:
                append_record(raw, measure(*cell, options))
            except WorkerFailed as error:
                print(f"{', '.join(map(str, cell))} workers: {error}", file=sys.stderr)
                append_record(raw, failure(*cell, options.quality, error))
                failed.append(cell)
    records = read_records(raw)
    if records:
        write = write_predictions if options.predictions else write_report
        print(f"wrote {write(records, options.out)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
