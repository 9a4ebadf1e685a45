# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What do schemes send over the wire, and what does hierarchy gain?

    python benchmarks/training/topology.py          # needs root; two to three minutes; writes topology.md

Two machines of two ranks each: network namespaces, unshaped links within a machine, one link of 200 Mb/s between them.
Tensors are exchanged again and again over Gloo: one where bytes are counted, eight, of a bucket each, where times are.

bytes      what the four interfaces have sent, against what follows from the plan: for each of its collectives the least
           that a group of n ranks has to send, and 66 B of headers (Ethernet, IP, TCP) for each packet sent.
hierarchy  pairs of a flat and a hierarchical plan: how much less time the second takes, against how many bytes less
           the machines send each other.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from conditions import describe_machine, source_commit
from launch import WorkerFailed, run_workers
from links import Links
from methods import require_cortado
from tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"intra": 2, "inter": 2}
RANKS = 4
HEADER_BYTES = 66  # of a packet: 14 Ethernet, 20 IP, 20 TCP, 12 TCP time stamps
LARGE_ELEMS, SMALL_ELEMS = 1_000_000, 20_000
TIMED_ELEMS = 16_000_000
TIMED_MESSAGES = 32  # as in a training: what one does within a machine, another does between machines
MOST_RATIO, MOST_SMALL_BYTES, LARGE_PLAN_BYTES = 0.03, 65536, 1_000_000
MOST_OFF = 0.10

HIERARCHY = "reduce_scatter@intra all_reduce@inter all_gather@intra"
GATHERED = "encode@cpu all_gather@intra..inter decode@cpu"
INTER_ONLY = "reduce_scatter@intra encode@cpu all_gather@inter decode@cpu all_gather@intra"
REENCODED = "encode@cpu all_to_all@intra decode@cpu encode@cpu all_gather@inter all_gather@intra decode@cpu"


@dataclass(frozen=True)
class Case:
    codec: str
    option: str

    @property
    def name(self) -> str:
        return f"`{self.codec}`: `{self.option.replace('@cpu', '').replace('intra..inter', 'flat')}`"


PAIRS = [
    (Case("none", "all_reduce@intra..inter"), Case("none", HIERARCHY)),
    (
        Case("cast(bf16)", "encode@cpu all_reduce@intra..inter decode@cpu"),
        Case("cast(bf16)", f"encode@cpu {HIERARCHY} decode@cpu"),
    ),
    (Case("cast(bf16)", GATHERED), Case("cast(bf16)", REENCODED)),
    (Case("cast(bf16)", GATHERED), Case("cast(bf16)", INTER_ONLY)),
]
OTHERS = [
    Case("none", "reduce_scatter@intra..inter all_gather@intra..inter"),
    Case("none", "reduce@intra all_reduce@inter broadcast@intra"),
    Case("quant(bits=4)", GATHERED),
    Case("quant(bits=4)", INTER_ONLY),
    Case(
        "quant(bits=4)",
        "encode@cpu all_to_all@intra..inter decode@cpu encode@cpu all_gather@intra..inter decode@cpu",
    ),
    Case("topk(density=0.01)", "encode@cpu gather@intra all_gather@inter broadcast@intra decode@cpu"),
]


@dataclass
class Measured:
    """Of one step; bytes and packets of all ranks together."""

    seconds: float = 0
    sent_bytes: float = 0
    sent_packets: float = 0
    payload_bytes: int = 0  # of one rank's tensor, encoded
    between_bytes: float = 0  # machines
    counters: list = field(default_factory=list)


def operations(option: str) -> list[dict]:
    """ "encode@cpu all_gather@intra..inter" as a plan has it."""
    words = (word.split("@") for word in option.split())
    return [
        {"op": op, "device": place} if op in ("encode", "decode") else {"op": op, "levels": place.split("..")}
        for op, place in words
    ]


def plan_of(case: Case, messages: int) -> dict:
    return {
        "format": "cortado.plan/1",
        "job": "one tensor",
        "cluster": "two machines",
        "levels": [{"name": name, "ranks": ranks} for name, ranks in LEVELS.items()],
        "buckets": [
            {"tensors": [f"tensor{i}"], "codec": case.codec, "option": operations(case.option)} for i in range(messages)
        ],
        "notes": [],
    }


def expected_bytes(case: Case, elems: int, payload_bytes: int) -> float:
    """What all ranks together must send: a group of n ranks that each hold B bytes sends (n - 1) B to divide or to
    collect them, n (n - 1) B to let all have all, twice (n - 1) B to sum. `payload_bytes`: of a whole tensor."""
    total, active = 0.0, RANKS  # ranks that are not waiting for a root
    share, contributors, encoded = 1.0, 1, False  # of the tensor that a rank holds, and of how many ranks
    for op in operations(case.option):
        kind = op["op"]
        if kind in ("encode", "decode"):
            encoded, contributors = kind == "encode", 1
            continue
        ranks = 1
        for level in op["levels"]:
            ranks *= LEVELS[level]
        held = share * contributors * (payload_bytes if encoded else 4 * elems)
        if kind == "broadcast":
            active *= ranks
        groups = active / ranks
        if kind == "all_reduce":
            total += groups * 2 * (ranks - 1) * held
        elif kind == "all_gather":
            total += groups * ranks * (ranks - 1) * held
            if share < 1 and encodes_parts(case.option, op):
                share *= ranks
            else:
                contributors *= ranks
        else:
            total += groups * (ranks - 1) * held
        if kind in ("reduce_scatter", "all_to_all"):
            share /= ranks
        if kind in ("all_to_all", "gather"):
            contributors *= ranks
        if kind in ("reduce", "gather"):
            active /= ranks
    return total


def encodes_parts(option: str, op: dict) -> bool:
    """Whether an all-gather answers a division over the same levels."""
    levels = "..".join(op["levels"])
    return f"reduce_scatter@{levels}" in option or f"all_to_all@{levels}" in option


def measure(cases: list[Case], elems: int, options, messages: int = 1) -> dict[Case, Measured]:
    results = {case: Measured() for case in cases}

    def on_event(event: dict) -> None:
        kind = event.pop("event")
        measured = results[cases[event.pop("case")]]
        if kind == "counted":
            measured.counters.append(links.sent_between_machines()[0])
        elif kind == "measured":
            measured.seconds = statistics.median(event["seconds"])
            measured.sent_bytes, measured.sent_packets = event["sent_bytes"], event["sent_packets"]
            measured.payload_bytes = event["payload_bytes"]

    config = {
        "cases": [{"codec": case.codec, "plan": plan_of(case, messages)} for case in cases],
        "elems": elems,
        "messages": messages,
        "steps": options.steps,
    }
    with Links(RANKS, options.rate, machines=2) as links:
        print(f"{elems} values: {links.describe()}", flush=True)
        run_workers(links, Path(__file__).with_name("topology_worker.py"), config, on_event)
    for measured in results.values():
        measured.between_bytes = (measured.counters[1] - measured.counters[0]) / options.steps
    return results


def bytes_table(results: dict[Case, Measured], elems: int) -> tuple[str, bool]:
    rows, all_met = [], True
    for case, measured in results.items():
        planned = expected_bytes(case, elems, measured.payload_bytes)
        headers = HEADER_BYTES * measured.sent_packets
        off = measured.sent_bytes - planned - headers
        met = abs(off) <= MOST_RATIO * planned if planned > LARGE_PLAN_BYTES else abs(off) <= MOST_SMALL_BYTES
        all_met = all_met and met
        cells = (f"{planned:,.0f}", f"{headers:,.0f}", f"{measured.sent_bytes:,.0f}", f"{100 * off / planned:+.2f} %")
        rows.append([case.name, *cells, "yes" if met else "**no**"])
    return markdown_table(["plan", "payloads, B", "headers, B", "on the interfaces, B", "off", "met"], rows), all_met


def hierarchy_table(results: dict[Case, Measured]) -> tuple[str, bool]:
    rows, all_met = [], True
    for flat, hierarchical in PAIRS:
        a, b = results[flat], results[hierarchical]
        predicted, gained = a.between_bytes / b.between_bytes, a.seconds / b.seconds
        met = abs(gained / predicted - 1) <= MOST_OFF
        all_met = all_met and met
        cells = (f"{x:.2f}" for x in (a.between_bytes / 1e6, b.between_bytes / 1e6, predicted))
        more = (f"{1e3 * a.seconds:.0f}", f"{1e3 * b.seconds:.0f}", f"{gained:.2f}", "yes" if met else "**no**")
        rows.append([f"{flat.name} → {hierarchical.name}", *cells, *more])
    header = ["flat → hierarchical", "MB between", "after", "predicted", "ms a step", "after", "factor", "met"]
    return markdown_table(header, rows), all_met


def write_report(large: dict, small: dict, timed: dict, options) -> bool:
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    of_large, large_met = bytes_table(large, LARGE_ELEMS)
    of_small, small_met = bytes_table(small, SMALL_ELEMS)
    gains, gains_met = hierarchy_table(timed)
    parts = [
        "# Schemes on the wire: bytes, and what hierarchy gains",
        f"`python benchmarks/training/topology.py`; commit {source_commit()}; {machine}. 2 machines of 2 ranks, "
        f"network namespaces, {options.rate} between machines and unshaped links within; a message a tensor, "
        f"{options.steps} steps after one that is not counted; Gloo.",
        f"## Bytes, {LARGE_ELEMS:,} values",
        "Of one step, all ranks together. Payloads: the least that the plan's collectives must send. Headers: "
        f"{HEADER_BYTES} B for each packet that the interfaces counted (a packet may be 64 KB, the kernel cuts it "
        f"later). Bar: off by at most {MOST_RATIO:.0%} of a plan above {LARGE_PLAN_BYTES / 1e6:.0f} MB, "
        f"{MOST_SMALL_BYTES} B of others.",
        of_large,
        f"## Bytes, {SMALL_ELEMS:,} values",
        of_small,
        f"## Hierarchical against flat, {TIMED_ELEMS:,} values in {TIMED_MESSAGES} messages",
        f"MB that the machines send each other in a step, counted on their links, and time of a step: medians. Bar: "
        f"the factor of times is within {MOST_OFF:.0%} of that of bytes. A step is more than its transfer between "
        "machines: what the first message does within its machine, and the last on its way back, nothing hides.",
        gains,
    ]
    path = options.out / "topology.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {path}")
    return large_met and small_met and gains_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="200mbit", help="between machines (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    require_cortado(["acp"])
    if why := Links(RANKS, options.rate, machines=2).why_loopback:
        print(f"topology: there is nothing to measure without network namespaces: {why}", file=sys.stderr)
        return 1
    paired = list(dict.fromkeys(case for pair in PAIRS for case in pair))
    try:
        timed = measure(paired, TIMED_ELEMS, options, TIMED_MESSAGES)
        large, small = (measure(paired + OTHERS, elems, options) for elems in (LARGE_ELEMS, SMALL_ELEMS))
    except WorkerFailed as error:
        print(f"topology: {error}", file=sys.stderr)
        return 1
    return 0 if write_report(large, small, timed, options) else 1


if __name__ == "__main__":
    sys.exit(main())
