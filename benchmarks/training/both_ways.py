# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What does a connection for each way gain, where ranks send each other much at once?

    python benchmarks/training/both_ways.py          # needs root; about four minutes; writes both_ways.md

Collectives over Gloo as Cortado starts them (python/cortado/group.py), with Gloo's one connection between two ranks and
with one for each way, in turn. Ranks start one after the other, as those that train do. Milliseconds, medians, from the
last start to the last end; what the bytes take alone is a rank's own, without headers, at the link's rate.
"""

import argparse
import statistics
from pathlib import Path

from conditions import describe_machine, source_commit
from launch import run_workers
from links import Links
from tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
CELLS = [(2, "100mbit"), (2, "1gbit"), (2, "unshaped"), (4, "100mbit"), (4, "1gbit"), (4, "unshaped")]
SLOW_BYTES, FAST_BYTES = (128 * 2**10, 2**20, 2**22), (128 * 2**10, 2**20, 2**24)  # all that a rank sends


def kinds_of(ranks: int) -> list[str]:
    return ["all_gather", "all_to_all", "reduce_scatter"] if ranks == 2 else ["all_to_all", "reduce_scatter"]


def measure(ranks: int, rate: str, rounds: int) -> list[list[str]]:
    rows = []

    def note(event: dict) -> None:
        one, each = (statistics.median(event[way]) for way in ("one", "each"))
        ratios = [b / a for a, b in zip(event["one"], event["each"], strict=True)]
        alone = "-" if rate == "unshaped" else f"{event['bytes'] * 8 / bits_per_s * 1e3:.1f}"
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        size = f"{event['bytes'] / 2**20:.3g} MiB"
        rows.append([str(ranks), rate, f"`{event['kind']}`", size, alone, f"{one:.1f}", f"{each:.1f}", spread])
        print("  ".join(rows[-1]), flush=True)

    with Links(ranks, rate) as links:
        bits_per_s = links.bits_per_s
        sizes = SLOW_BYTES if rate == "100mbit" else FAST_BYTES
        config = {"kinds": kinds_of(ranks), "bytes": sizes, "rounds": rounds}
        run_workers(links, Path(__file__).with_name("both_ways_worker.py"), config, note)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    given = parser.parse_args()
    rows = [row for ranks, rate in CELLS for row in measure(ranks, rate, given.rounds)]
    header = ["workers", "link", "collective", "a rank sends", "bytes alone", "one connection", "one each way", "ratio"]
    conditions = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    text = f"""# A connection for each way

`benchmarks/training/both_ways.py`: collectives over Gloo as Cortado starts them, with Gloo's one connection between two
ranks and with one for each way, in turn. Milliseconds, medians of {given.rounds}; ratio: of times with one each way to
those with one connection, the median and the extremes of rounds. Ranks start 5 ms apart in all; counted from the last
start. What the bytes take alone is a rank's own, without headers. All sizes are measured in both ways: of those at or
below 128 KiB a block, Cortado sends all but an all-to-all of varying sizes over one connection. Why:
[ADR 0042](../adr/0042-a-connection-each-way.md); what trainings gain: [both_ways_reading.md](both_ways_reading.md).

{markdown_table(header, rows)}

- commit {source_commit()}; {conditions}
- one network namespace a worker, one thread a worker, pinned
"""
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "both_ways.md").write_text(text)
    print(f"wrote {given.out / 'both_ways.md'}")


if __name__ == "__main__":
    main()
