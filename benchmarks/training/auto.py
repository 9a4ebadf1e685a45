# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Is `auto` as fast as the best that its quality level allows, and does it predict what it measures?

    python benchmarks/training/auto.py                                     # the whole sweep
    python benchmarks/training/auto.py --models mlp --rates 1gbit --workers 4

In each run auto decides first (those steps are reported apart). Then all rivals are measured in rotation, and the
fastest of them is chosen; then auto and that rival are measured again, in alternation. Runs are appended to auto.jsonl;
auto.md is made from the latest run of each model, rate and number of workers (`--report-only`: made again, nothing
measured).
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

from conditions import describe_machine, source_commit
from launch import WorkerFailed, run_workers
from links import Links, parse_rate_bits_per_s
from methods import DDP_FLAGS, require_cortado
from records import append_record, read_records
from tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
POWERSGD = [f"powersgd(rank={rank})" for rank in (1, 2, 4)]
QUALITIES = ("safe", "balanced", "aggressive")
LEGEND = """\
Auto decides first: dense steps, links and codecs measured, some settings tried. Then every rival is measured in
rotation and the fastest chosen, and then auto and that rival again, in alternation: "auto ms" and "best rival ms"
are medians over rounds of a round's median step of that second set, and "auto / rival" is the median of the ratios
of single rounds, with the least and the greatest. Rivals: DDP, the bf16 hook, each fixed setting that the quality
level allows; at aggressive also PyTorch's PowerSGD hook at rank 1, 2, 4. Predicted: what the planner said of the
chosen setting (and of dense) before it was tried; measured beside it: the median of its steps on trial. Error:
share (L2) of gradient plus residual that a step of auto held back. Measuring: steps until the decision, and their
time."""
HEADER = [
    "model",
    "link",
    "workers",
    "auto chose",
    "auto ms",
    "best rival",
    "best rival ms",
    "auto / rival",
    "error",
    "predicted / measured",
    "dense predicted / measured",
    "measuring",
]


def rivals_of(quality: str) -> list[str]:
    from cortado import _core

    allowed = QUALITIES[: QUALITIES.index(quality) + 1]
    fixed = [spec for spec, least, _ in _core.auto_settings() if least in allowed]
    return ["ddp", "bf16", *fixed, *(POWERSGD if quality == "aggressive" else [])]


def measure(model: str, rate: str, workers: int, options) -> dict:
    config = {
        "model": model,
        "auto": f"auto(quality={options.quality})",
        "rivals": rivals_of(options.quality),
        "choosing_rounds": options.choosing_rounds,
        "rounds": options.rounds,
        "discard": options.discard,
        "timed": options.timed,
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
        run_workers(links, Path(__file__).with_name("auto_worker.py"), config, on_event, 600)
    return record


# ---- report ----------------------------------------------------------------------------------------------------------


def share(predicted_ns, measured_ns) -> str:
    if predicted_ns is None or measured_ns is None:
        return "-"
    error = predicted_ns / measured_ns - 1
    return f"{predicted_ns / 1e6:.0f} / {measured_ns / 1e6:.0f} ms ({100 * error:+.0f} %)"


def round_ratios(record: dict) -> list[float]:
    rounds = {}
    for block in record["blocks"]:
        if block["set"] == "comparing":
            rounds.setdefault(block["round"], {})[block["method"]] = block["step_ms"]
    rival = record["rival"]["method"]
    return [times[record["auto"]] / times[rival] for times in rounds.values()]


def row(record: dict) -> list[str]:
    decision = record["decided"]["decision"]
    dense, chosen = decision["candidates"][0], decision["candidates"][decision["chosen"]]
    times, rival = record["result"]["times_ms"], record["rival"]["method"]
    ratios = round_ratios(record)
    steps_ms = record["decided"]["measuring_steps_ms"]
    return [
        record["model"],
        record["rate"],
        str(record["workers"]),
        f"`{chosen['label']}`",
        f"{times[record['auto']]:.0f}",
        f"`{rival}`",
        f"{times[rival]:.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        f"{record['result']['error']:.3f}",
        share(chosen["predicted_ns"], chosen["measured_ns"]),
        share(dense["predicted_ns"], dense["measured_ns"]),
        f"{len(steps_ms)} steps, {sum(steps_ms) / 1e3:.1f} s",
    ]


def prediction_errors(records: list[dict]) -> list[float]:
    """Of every candidate that was predicted and tried, dense among them."""
    return [
        abs(candidate["predicted_ns"] / candidate["measured_ns"] - 1)
        for record in records
        for candidate in record["decided"]["decision"]["candidates"]
        if candidate["predicted_ns"] and candidate["measured_ns"]
    ]


def write_report(records: list[dict], path: Path) -> Path:
    latest = {(r["quality"], r["model"], r["rate"], r["workers"]): r for r in records}
    parts = ["# Auto against the best it may use", LEGEND]
    for quality in QUALITIES:
        mine = [record for key, record in sorted(latest.items()) if key[0] == quality]
        if not mine:
            continue
        slower = [record for record in mine if statistics.median(round_ratios(record)) > 1.03]
        errors = prediction_errors(mine)
        started = sorted(record["started"] for record in mine)
        commits = sorted({record["commit"] for record in mine})
        lines = [
            f"- runs: {started[0]} to {started[-1]}, commit {', '.join(commits)}",
            "- " + ", ".join(f"{key} {value}" for key, value in mine[-1]["machine"].items()),
            f"- links: {mine[-1]['links'].replace(mine[-1]['rate'], 'shaped')}; one thread a worker, pinned",
            f"- {mine[-1]['timed']} timed steps a block after {mine[-1]['discard']} untimed (2 after 1 where one takes"
            f" more than 2 s), {mine[-1]['choosing_rounds']} rounds to choose, {mine[-1]['rounds']} to compare",
            f"- auto slower than the best rival by more than 3 %: {len(slower)} of {len(mine)} runs",
            f"- predicted against measured step time, {len(errors)} settings tried: median error"
            f" {100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %",
        ]
        reasons = [f"- {r['model']}, {r['rate']}, {r['workers']}: {r['decided']['decision']['reason']}" for r in mine]
        table = markdown_table(HEADER, [row(record) for record in mine])
        parts += [f"## auto(quality={quality})", "\n".join(lines), table, "What it said:", "\n".join(reasons)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    return path


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="gpt,mlp,vgg", help="default: %(default)s")
    parser.add_argument("--rates", default="100mbit,1gbit,unshaped", help="default: %(default)s")
    parser.add_argument("--workers", default="2,3,4,5", help="default: %(default)s")
    parser.add_argument("--quality", default="balanced", choices=QUALITIES)
    parser.add_argument("--choosing-rounds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--discard", type=int, default=2, help="untimed steps a method and round")
    parser.add_argument("--timed", type=int, default=6, help="timed steps a method and round")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    options.models, options.rates = options.models.split(","), options.rates.split(",")
    if unknown := set(options.models) - {"gpt", "mlp", "vgg"}:
        parser.error(f"--models: {unknown.pop()!r} is none of gpt, mlp, vgg")
    try:
        options.workers = [int(count) for count in options.workers.split(",")]
        for rate in options.rates:
            parse_rate_bits_per_s(rate)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    options = parse_arguments()
    raw = options.out / "auto.jsonl"
    if not options.report_only:
        require_cortado(["auto"])
        for model, rate, workers in itertools.product(options.models, options.rates, options.workers):
            try:
                append_record(raw, measure(model, rate, workers, options))
            except WorkerFailed as error:
                print(f"{model}, {rate}, {workers} workers: {error}", file=sys.stderr)
                return 1
            write_report(read_records(raw), options.out / "auto.md")
    print(f"wrote {write_report(read_records(raw), options.out / 'auto.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
