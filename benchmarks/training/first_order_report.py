# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/first_order.md and its pictures from the raw records of `first_order.py`."""

import statistics
import textwrap
from pathlib import Path

from methods import NO_COMMUNICATION
from quality_report import groups_of
from quality_report import section as accuracy_section
from speed_report import notes, rounds_ms, sent_bytes, spread
from tables import markdown_table, megabytes

HEADER = ["method", "step ms", "compute", "compression", "exposed", "MB/step", "ratio", "error", "x faster than S-SGD"]
COMPRESSION = ("encode", "decode", "orthogonalise")
LEGEND = """\
Step: median over rounds of a round's median. Its parts, in ms: compute is the step without communication;
compression what Cortado's own clock says of encoding, decoding and orthogonalising, mean over all steps, -
where a method is not Cortado's; exposed the rest: communication that nothing hides, and what two workers on
one core wait for each other. MB/step: sent on one worker's interface. Ratio: S-SGD's bytes over the method's,
at the error beside it (share, L2, of gradient plus residual that a step held back). S-SGD is PyTorch's DDP in
fp32. In brackets the least and the greatest ratio of single rounds."""


def write_report(questions: dict[str, str], records: dict[str, dict], accuracy: list[dict], out: Path) -> Path:
    parts = ["# First-order methods: the evaluation of ACP-SGD, done again", LEGEND]
    reading = out / "first_order_reading.md"
    if reading.exists():
        parts.append(reading.read_text().strip())
    for name, question in questions.items():
        if name in records:
            parts.append(study_section(name, question, records[name], out))
    if accuracy:
        parts.append("## Accuracy at rank 4")
        parts += [f"#{accuracy_section(heading, group)}" for heading, group in groups_of(accuracy).items()]
    missing = [f"`{name}`" for name in questions if name not in records] + ([] if accuracy else ["`accuracy`"])
    if missing:
        parts.append(f"Not measured yet: the studies {', '.join(missing)}.")
    path = out / "first_order.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    return path


def study_section(name: str, question: str, record: dict, out: Path) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    conditions = (
        f"{record['model']}, {record['rate']}, {record['workers']} workers, {record['rounds']} rounds of "
        f"{record['timed']} steps; {record['started']}; {machine}; links: {record['links']}"
        + "".join(f"; **{note}**" for note in notes(record))
    )
    table = markdown_table(HEADER, [row(record, method) for method in record["results"]])
    picture = draw(record, out / "first_order" / f"{name}.png")
    return "\n\n".join(
        [f"## {name}: {question}", conditions, table, losers(record), f"![{name}](first_order/{picture.name})"]
    )


def step_ms(record: dict, method: str) -> float:
    return statistics.median(rounds_ms(record, method))


def parts_ms(record: dict, method: str) -> tuple[float, float | None, float]:
    """Compute, compression (None: not known) and what is left."""
    compute = step_ms(record, NO_COMMUNICATION)
    report = record["results"][method].get("report") or {}
    stages = report.get("time_by_stage_ns")
    compression = None
    if stages and report.get("steps"):
        compression = sum(stages.get(stage, 0) for stage in COMPRESSION) / report["steps"] / 1e6
    return compute, compression, max(0.0, step_ms(record, method) - compute - (compression or 0))


def row(record: dict, method: str) -> list[str]:
    result = record["results"][method]
    dense, mine = sent_bytes(record, "ddp"), sent_bytes(record, method)
    if method == NO_COMMUNICATION:
        return [f"`{method}`", f"{step_ms(record, method):.0f}", *["-"] * 6, spread(record, "ddp", method)]
    compute, compression, exposed = parts_ms(record, method)
    unequal = " **replicas differ**" if result.get("replicas_equal") is False else ""
    return [
        f"`{method}`{unequal}",
        f"{step_ms(record, method):.0f}",
        f"{compute:.0f}",
        "-" if compression is None else f"{compression:.0f}",
        f"{exposed:.0f}",
        megabytes(mine),
        f"{dense / mine:.1f}" if dense and mine else "-",
        f"{result['error']:.3f}",
        spread(record, "ddp", method),
    ]


def losers(record: dict) -> str:
    """Which methods lose to S-SGD here, and to which part of their step."""
    if "ddp" not in record["results"]:
        return ""
    lines = []
    _, _, exposed_of_ddp = parts_ms(record, "ddp")
    for method in record["results"]:
        if method in (NO_COMMUNICATION, "ddp") or step_ms(record, method) <= step_ms(record, "ddp"):
            continue
        _, compression, exposed = parts_ms(record, method)
        is_exposed = compression is None or exposed - exposed_of_ddp > compression
        cause = "exposed communication" if is_exposed else "compression"
        slower = step_ms(record, method) / step_ms(record, "ddp")
        lines.append(f"- `{method}` is {slower:.2f} times slower than S-SGD; most of the loss is {cause}")
    return "\n".join(lines) if lines else "No method here is slower than S-SGD."


def draw(record: dict, path: Path) -> Path:
    """Step time of each method as one bar of its parts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = [method for method in record["results"] if method != NO_COMMUNICATION]
    parts = [parts_ms(record, method) for method in methods]
    labels = ["\n".join(textwrap.wrap(method, 40, break_on_hyphens=False)) for method in methods]
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.42 * len(methods)), layout="constrained")
    left = [0.0] * len(methods)
    for label, colour, values in (
        ("compute", "#4c72b0", [compute for compute, _, _ in parts]),
        ("compression", "#dd8452", [compression or 0 for _, compression, _ in parts]),
        ("exposed", "#c9c9c9", [exposed for _, _, exposed in parts]),
    ):
        axes.barh(labels, values, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    # One slow method must not make the others unreadable.
    limit = 4 * statistics.median(left)
    if max(left) > limit:
        axes.set_xlim(0, limit)
        for index, total in enumerate(left):
            if total > limit:
                axes.annotate(
                    f"{total:.0f} ms",
                    (limit, index),
                    ha="right",
                    va="center",
                    xytext=(-4, 0),
                    textcoords="offset points",
                )
    axes.invert_yaxis()
    axes.set_xlabel(f"ms a step, {record['model']}, {record['rate']}, {record['workers']} workers")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
