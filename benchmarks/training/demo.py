# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The main job: a real model over a slow link, every method from the same weights for the same time.

    make demo
    RATE=100mbit SECONDS_EACH=40 python benchmarks/training/demo.py

Four workers, each pinned to a core, each (as root) in its own network namespace behind a link of
RATE (200mbit by default); without root on the loopback interface, which is not shaped. At the end one
table, and one picture of loss against wall time.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from conditions import describe_machine
from demo_report import result_table, write_picture
from launch import WorkerFailed, run_workers
from links import Links
from methods import TUNED, require_cortado

ROOT = Path(__file__).resolve().parents[2]
METHODS = [
    "ddp",
    "bf16",
    "powersgd(rank=4)",
    "power(rank=4)",
    "power(rank=8)",
    "acp(rank=4)",
    "acp(rank=8)",
    "no-communication",
]
PLAIN_PROGRESS_S = 5.0  # between lines where the output is no terminal


class Progress:
    """One line that moves on a terminal; a line every few seconds elsewhere."""

    def __init__(self, methods: list[str], seconds_each: float):
        self.methods = methods
        self.seconds_each = seconds_each
        self.number = 0
        self.told = 0.0

    def start(self, method: str) -> None:
        self.number += 1
        self.method = method
        self.told = time.monotonic()

    def show(self, text: str, last: bool = False) -> None:
        line = f"[{self.number}/{len(self.methods)}] {self.method:18} {text}"
        if sys.stdout.isatty():
            print(f"\r{line:78}", end="\n" if last else "", flush=True)
        elif last or time.monotonic() - self.told > PLAIN_PROGRESS_S:
            self.told = time.monotonic()
            print(line, flush=True)

    def on_event(self, event: dict) -> None:
        if event["event"] == "start":
            self.start(event["method"])
        elif event["event"] == "progress":
            at = f"{event['elapsed_s']:4.0f} of {self.seconds_each:.0f} s"
            self.show(f"{at}  step {event['steps']:4}  loss {event['loss']:.3f}")
        elif event["event"] == "result":
            done = f"{len(event['losses'])} steps of {event['step_ms']:.0f} ms"
            self.show(f"{done}, validation loss {event['validation_loss']:.3f}", last=True)


def compare(options) -> dict:
    """Runs all methods; returns everything measured, with its conditions."""
    record = {
        "seconds_each": options.seconds_each,
        "workers": options.workers,
        "machine": describe_machine(),
        "results": {},
    }
    progress = Progress(options.methods, options.seconds_each)

    def on_event(event: dict) -> None:
        progress.on_event(event)
        if event["event"] == "result":
            record["results"][event["method"]] = event

    config = {"methods": options.methods, "seconds_each": options.seconds_each}
    with Links(options.workers, options.rate) as links:
        record["links"] = links.describe()
        record["shaped"] = links.namespaced and links.bits_per_s is not None
        print("byte-level GPT, 10.9 M parameters, batch 2 x 64 tokens a worker")
        print(f"{options.workers} workers, {links.describe()}; {options.seconds_each:g} s a method")
        print("starting the workers ...", flush=True)
        idle_s = 300 + options.seconds_each
        run_workers(links, Path(__file__).with_name("demo_worker.py"), config, on_event, idle_s)
    return record


def parse_arguments():
    environment = os.environ
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default=environment.get("RATE") or "200mbit")
    seconds = environment.get("SECONDS_EACH") or "25"
    parser.add_argument("--seconds-each", type=float, default=seconds)
    parser.add_argument("--methods", help="separated by ';' (default: the comparison)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("build") / "demo")
    options = parser.parse_args()
    chosen = options.methods.split(";") if options.methods else METHODS
    options.methods = [name.strip() for name in chosen]
    if not (math.isfinite(options.seconds_each) and options.seconds_each > 0):
        parser.error("--seconds-each (SECONDS_EACH): expected a number above 0")
    if TUNED in options.methods:
        parser.error(f"--methods: {TUNED} takes a search of its own, which speed.py makes; take ddp here")
    return options


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        options = parse_arguments()
        require_cortado(options.methods)
        record = compare(options)
    except (WorkerFailed, ValueError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.json").write_text(json.dumps(record) + "\n")
    print(f"\n{result_table(record)}\n")
    print(f"picture: {write_picture(record, options.out / 'loss.png')}")
    print(f"data:    {options.out / 'demo.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
