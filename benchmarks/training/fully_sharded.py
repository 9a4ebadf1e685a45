# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What does a Reducer between the replicas of a model of fully_shard gain?

    python benchmarks/training/fully_sharded.py      # needs root; some ten minutes; writes fully_sharded.md

Two machines of two ranks each: network namespaces, unshaped links within a machine, a link of --rate between them.
Each machine holds one replica of the GPT in two shards. fully_shard on a mesh of both dimensions, in fp32 and with its
sums in bf16, is what PyTorch does alone.
"""

import argparse
import statistics
import sys
from pathlib import Path

from conditions import describe_machine, source_commit
from fully_sharded_worker import NATIVE, NATIVE_BF16, NOTHING
from launch import WorkerFailed, run_workers
from links import Links
from methods import require_cortado
from tables import markdown_table, megabytes, times

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
METHODS = [NATIVE, NATIVE_BF16, "none", "cast(bf16)", "quant(bits=4, round=dead_zone)", "compso(bound=4e-3)"]
METHODS += ["acp(rank=4)", "acp(rank=8)", NOTHING]


def say(text: str) -> None:
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{text:<78}", end=end, file=sys.stderr, flush=True)


def measure(rate: str, options) -> list[dict]:
    """A record for each method."""
    records = [{"method": method, "seconds": [], "counters": []} for method in METHODS]

    def on_event(event: dict) -> None:
        kind = event.pop("event")
        if kind == "counted":
            record = records[event["case"]]
            record["counters"].append(links.sent_between_machines()[0])
            say(f"{rate}, bytes of {record['method']}")
        elif kind == "timed":
            record = records[event["method"]]
            record["seconds"] += event["seconds"]
            done = len(record["seconds"]) // options.steps
            say(f"{rate}, round {done} of {options.rounds}, {record['method']}: {event['seconds'][-1]:.2f} s a step")
        elif kind == "ended":
            records[event.pop("method")].update(event)

    config = {"methods": METHODS, "rounds": options.rounds, "steps": options.steps, "discard": options.discard}
    with Links(RANKS, rate, machines=2) as links:
        print(f"{rate}: {links.describe()}", flush=True)
        run_workers(links, Path(__file__).with_name("fully_sharded_worker.py"), config, on_event)
    different = [record["method"] for record in records if not record["equal"] and record["method"] != NOTHING]
    if different:
        raise WorkerFailed(f"replicas differ at the end: {', '.join(different)}")
    return records


def section(rate: str, records: list[dict]) -> list[str]:
    ms = {record["method"]: 1e3 * statistics.median(record["seconds"]) for record in records}
    rows = []
    for record in records:
        method = record["method"]
        between = (record["counters"][1] - record["counters"][0]) / 2
        named = method in (NATIVE, NATIVE_BF16, NOTHING)
        rows.append(
            [
                method if named else f"Reducer, `{method}`",
                f"{ms[method]:.0f}",
                times(ms[NATIVE] / ms[method]),
                times(ms[NATIVE_BF16] / ms[method]),
                times(ms[method] / ms[NOTHING]),
                megabytes(between),
                "-" if named else f"{record['error']:.3f}",
                "-" if method == NOTHING else f"{record['loss']:.3f}",
            ]
        )
    header = ["method", "ms a step", "than fully_shard", "than in bf16", "of the limit", "MB between", "error", "loss"]
    return [f"## {rate} between the machines", markdown_table(header, rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["200mbit"], help="between machines")
    parser.add_argument("--rounds", type=int, default=4, help="of --steps steps of each method in turn")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--discard", type=int, default=3, help="steps of each method before the bytes are counted")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    require_cortado(METHODS[2:-1])
    if why := Links(RANKS, options.rates[0], machines=2).why_loopback:
        print(f"fully_sharded: there is nothing to measure without network namespaces: {why}", file=sys.stderr)
        return 1
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    steps = options.discard + 2 + options.rounds * options.steps + 4
    parts = [
        "# Between the replicas of a sharded model",
        f"`python benchmarks/training/fully_sharded.py`; commit {source_commit()}; {machine}. 2 machines of 2 ranks, "
        "network namespaces, unshaped within a machine; GPT of 10.9 M parameters, each machine one replica in two "
        "shards (`fully_shard` of each block); Gloo.",
        f"Medians of {options.rounds * options.steps} steps, in {options.rounds} rounds of all methods in turn, one "
        "run. *fully_shard*: a mesh of two dimensions, with which it averages over the replicas, too; *in bf16*: its "
        "sums in bf16 (`reduce_dtype`), within replicas as well. *MB between*: what the machines sent each other in a "
        "step, headers included. *error*: the share of gradient plus residual that the last step held back. *loss*: of "
        f"training, mean of the last 4 of {steps} steps. Replicas were compared bit by bit at the end.",
    ]
    try:
        for rate in options.rates:
            parts += section(rate, measure(rate, options))
    except WorkerFailed as error:
        print(f"fully_sharded: {error}", file=sys.stderr)
        return 1
    path = options.out / "fully_sharded.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
