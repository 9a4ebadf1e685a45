# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/speed.md from the raw records of `speed.py`."""

import statistics
from pathlib import Path

from links import LOOPBACK, is_namespaced
from methods import NO_COMMUNICATION, parse_method
from tables import markdown_table, megabytes

POWER = ("powersgd(rank=4)", "powersgd-batched(rank=4)")  # the faster one is the baseline
VGG_SINCE = "2026-11-27 07:46"  # commit 8ccee1a
HEADER = [
    "method",
    "step ms",
    "sent MB/step",
    "ratio",
    "error",
    "x faster than DDP",
    "x faster than PowerSGD r4",
    "x of no communication",
]
LEGEND = """\
Step: median over rounds of a round's median step (no optimiser state or weights are shared between
methods). Sent: on one worker's interface, or, on loopback, the payload handed to the collectives
(marked p). Ratio: DDP's bytes over the method's. Error: share (L2) of gradient plus residual that a
step held back, mean over workers; the ratio was reached at this error; 0.000 of a
low-rank row says that gradients were zero, as the net no longer trained: no valid ratio. Speed ratios: median of the
ratios of single rounds, in brackets the least and the greatest. PowerSGD r4: the faster of its rows."""


def key_of(record: dict) -> tuple:
    """What a later record must have in common with an earlier one to replace it. Without root nothing is shaped."""
    device = record.get("device", "cpu")
    return record["model"], record["rate"], record["workers"], device, is_namespaced(record)


def write_report(records: list[dict], path: Path) -> Path:
    """Writes the tables of the latest record of each model, rate, number of workers, device and kind of links."""
    latest = {key_of(record): record for record in records}
    parts = ["# Training step time by method", LEGEND]
    parts += [section(record) for record in latest.values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    return path


def section(record: dict) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    flags = ", ".join(f"{key}={value}" for key, value in record["ddp_flags"].items())
    commit = f", commit {record['commit']}" if "commit" in record else ""  # of earlier runs it was not written down
    tuning = record.get("bucket_tuning_ms", {})
    lines = [
        f"- {record['started']}{commit}; {machine}; {placement(record)}",
        f"- {record['workers']} workers; links: {record['links']}",
        f"- {record['rounds']} rounds in rotation; {step_counts(record)}",
        f"- DDP flags of all methods: {flags}",
        "- DDP's bucket_cap_mb: " + bucket_caps(record),
    ]
    if tuning:
        tried = ", ".join(f"{cap} MiB {value:.0f} ms" for cap, value in tuning.items())
        lines.append(f"- `ddp-tuned` is the fastest of: {tried}")
    lines += [f"- **{note}**" for note in notes(record)]
    table = markdown_table(HEADER, [row(record, name) for name in record["results"]])
    return "\n\n".join([f"## {heading(record)}", "\n".join(lines), table])


def heading(record: dict) -> str:
    """Model and rate, and what is not as usual."""
    _, _, workers, device, namespaced = key_of(record)
    unusual = {f"{workers} workers": workers != 4, device: device != "cpu", LOOPBACK: not namespaced}
    return ", ".join([record["model"], record["rate"], *(text for text, is_so in unusual.items() if is_so)])


def notes(record: dict) -> list[str]:
    """What must be known of a record's model."""
    if record["model"] != "vgg" or record["started"] >= VGG_SINCE:
        return []
    steps = record["warm_up_steps"] + record["rounds"] * (record["discard"] + record["timed"])
    return [
        "the VGG as it was before commit 8ccee1a, whose wide layer is dead after some 90 steps, and gradients before "
        f"it are 0 then (here a method took {steps} steps and two for its error): not figures of today's VGG"
    ]


def placement(record: dict) -> str:
    where = "pinned alternately" if record.get("device", "cpu") == "cpu" else "all on one CUDA device"
    return f"one thread a worker, {where}"


def step_counts(record: dict) -> str:
    text = f"{record['timed']} timed steps a method and round, after {record['discard']} untimed"
    fewer = [name for name, result in record["results"].items() if result["timed"] != record["timed"]]
    if fewer:
        result = record["results"][fewer[0]]
        names = ", ".join(f"`{name}`" for name in fewer)
        text += f" ({result['timed']} after {result['discard']} for the slow {names})"
    return text


def bucket_caps(record: dict) -> str:
    caps = {name: result.get("bucket_cap_mib") for name, result in record["results"].items()}
    own = [f"`{name}` {cap:g} MiB" for name, cap in caps.items() if cap is not None]
    return "; ".join(["PyTorch's default (25 MiB, first 1 MiB)", *own])


def row(record: dict, name: str) -> list[str]:
    result = record["results"][name]
    steps = rounds_ms(record, name)
    dense, mine = sent_bytes(record, "ddp"), sent_bytes(record, name)
    silent = not parse_method(name).communicates
    ratio = "-" if silent or not dense or not mine else f"{dense / mine:.1f}"
    error = "-" if silent else f"{result['error']:.3f}"
    mark = "" if _interface_bytes(record, name) is not None else "p"
    against = [spread(record, "ddp", name), spread(record, fastest(record, POWER), name)]
    over_limit = spread(record, name, NO_COMMUNICATION)
    cells = [f"{statistics.median(steps):.1f}", megabytes(mine) + mark, ratio]
    unequal = " **replicas differ**" if result.get("replicas_equal") is False else ""
    return [f"`{name}`{unequal}", *cells, error, *against, over_limit]


def rounds_ms(record: dict, name: str) -> list[float]:
    blocks = [block for block in record["blocks"] if block["method"] == name]
    return [block["step_ms"] for block in sorted(blocks, key=lambda block: block["round"])]


def _interface_bytes(record: dict, name: str) -> float | None:
    values = [b["sent_bytes_per_step"] for b in record["blocks"] if b["method"] == name]
    return statistics.median(values) if values and None not in values else None


def sent_bytes(record: dict, name: str) -> float | None:
    interface = _interface_bytes(record, name)
    return record["results"].get(name, {}).get("payload_bytes") if interface is None else interface


def fastest(record: dict, names: tuple[str, ...]) -> str:
    """The name with the least median step time of those that were measured; the first one if none was."""
    measured = [name for name in names if rounds_ms(record, name)]
    return min(measured, key=lambda name: statistics.median(rounds_ms(record, name)), default=names[0])


def spread(record: dict, slow: str, fast: str) -> str:
    """Time of `slow` over time of `fast`: median of the rounds, least and greatest."""
    pairs = zip(rounds_ms(record, slow), rounds_ms(record, fast), strict=False)
    ratios = [a / b for a, b in pairs]
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
