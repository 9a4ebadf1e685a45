# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/gpu.md from the rows in docs/results/gpu/ that a section which is done has written."""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from sections import Results, Section

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

from tables import markdown_table  # noqa: E402

Rows = list[dict[str, str]]
# In the order of the table; the goal is a share of the bandwidth of a copy.
SHARES = {
    "cast(bf16)": 0.8,
    "sign": 0.8,
    "quant(bits=4)": 0.8,
    "quant(bits=4, round=stochastic)": 0.8,
    "compso(bound=4e-3, coder=none)": 0.8,
    "fp8(e4m3)": 0.8,
    "low rank 4": 0.8,
    "topk(density=0.01, select=sampled)": 0.5,
}
EXACT_TOPK = "topk(density=0.01)"
RANS_GB_PER_S = 400
TOPK_TIMES = 3
STEP_SHARE, STEP_TIMES = 0.03, 2
KFAC_TIMES = {"factors": 1, "precondition": 1}  # as fast as torch's own products
OURS = ("acp(rank=4)", "power(rank=4)", "quant(bits=8)")
THEIRS = ("bf16", "powersgd(rank=4)", "powersgd-batched(rank=4)")


@dataclass(frozen=True)
class Number:
    """One of the issue's numbers."""

    what: str
    found: str
    wanted: str
    is_met: bool


def write(results: Results, sections: tuple[Section, ...]) -> Path:
    parts = [
        "# On a GPU",
        INTRODUCTION,
        machines(results, sections),
        "## How the sections went",
        states(results, sections),
    ]
    if found := numbers(results):
        rows = [[n.what, n.found, n.wanted, "yes" if n.is_met else "**no**"] for n in found]
        parts += ["## The numbers that were set as goals", markdown_table(["", "found", "goal", "met"], rows)]
    for title, name, how, columns in TABLES:
        if rows := read(results, name):
            chosen = [column for column in columns if column in rows[0]]
            body = [[row[column] for column in chosen] for row in rows]
            links = "; ".join(dict.fromkeys(row["links"] for row in rows if "links" in row))
            source = f"`gpu/{name}`" + (f"; {links}" if links else "")
            parts += [f"## {title}", f"{source}. {how}", markdown_table(chosen, body)]
    results.page.parent.mkdir(parents=True, exist_ok=True)
    results.page.write_text("\n\n".join(parts) + "\n")
    return results.page


SECTION_OF = {
    "codecs.csv": "kernels",
    "topk.csv": "topk",
    "acp.csv": "acp",
    "kfac.csv": "kfac",
    "training.csv": "training",
    "calibration.csv": "calibrate",
}

INTRODUCTION = """\
Written by `tools/gpu_check`, which says how. What was compared with what before it was timed stands above each table.
Times of codecs, top-k and ACP are medians between events on the stream, the others on the host's clock."""

TABLES = (
    (
        "Codecs",
        "codecs.csv",
        "Before the clock started, payloads and decoded values of the first and the last tensor were compared with "
        "those of the codec on the CPU: bytes where its specification gives bytes, its bound for low-rank projections "
        "(of `low rank` rows the last matrix). `acp(rank=4)` is the codec by itself: one side of rank 4 a step.",
        (
            *("codec", "direction", "tensors", "values", "payload_bytes", "entropy_bits", "median_us", "slowest_us"),
            *("moved_GB_per_s", "input_GB_per_s", "share_of_copy"),
        ),
    ),
    (
        "Top-k",
        "topk.csv",
        "Of torch's result it was checked that it has the largest magnitudes; ours is in the table of codecs.",
        ("what", "values", "kept", "median_us", "slowest_us"),
    ),
    (
        "A step of ACP-SGD on the matrices of a model of 350 M parameters",
        "acp.csv",
        "Of ACP the first, a middle and the last matrix were compared with the CPU's; of PowerSGD's hook it was "
        "checked that a matrix has its rank, of a backward pass that the loss is finite. A step of `acp(rank=4)` is "
        "the mean of one that sends row factors and one that sends column factors, of rank 4, as with `phase=global`; "
        "the default sends both, of rank 2, in every step.",
        ("what", "elems", "tokens", "median_us", "slowest_us"),
    ),
    (
        "K-FAC's work",
        "kfac.csv",
        "Factors and preconditioned gradients were compared with torch's before (`difference`); inverses only by the "
        "gradients that were preconditioned with them.",
        ("model", "what", "who", "median_ms", "slowest_ms", "difference"),
    ),
    (
        "Training on one device",
        "training.csv",
        "Nothing was compared with the CPU. Errors are after the steps that were timed, some 20, and compare within a "
        "method only; `replicas_equal`: whether parameters were the same on all ranks at the end, bit for bit.",
        ("model", "workers", "rate", "method", "step_ms", "slowest_ms", "sent_bytes", "error", "replicas_equal"),
    ),
    (
        "What calibration measures of codecs",
        "calibration.csv",
        "Times alone: nothing was compared.",
        ("codec", "device", "direction", "elems", "time_us", "spread_us"),
    ),
)


def machines(results: Results, sections: tuple[Section, ...]) -> str:
    """What the sections ran on; more than once where that differs."""
    groups: dict[tuple, list[str]] = {}
    for section in sections:
        if outcome := results.outcomes.get(section.name):
            kept = {key: value for key, value in outcome.facts.items() if key not in ("clocks", "pack")}
            groups.setdefault(tuple(kept.items()), []).append(section.name)
    lines = []
    for facts, names in groups.items():
        names_text = "" if len(groups) == 1 else f"{', '.join(names)}: "
        lines.append(f"- {names_text}{'; '.join(f'{key} {value}' for key, value in facts)}")
        clocks = {results.outcomes[name].facts.get("clocks") for name in names} - {None}
        lines += [f"  - clocks: {text}" for text in sorted(clocks)[:1]]
    return "\n".join(lines)


def states(results: Results, sections: tuple[Section, ...]) -> str:
    rows = []
    for section in sections:
        outcome = results.outcomes.get(section.name)
        text = " ".join(outcome.text.split()).replace("|", "\\|") if outcome else ""
        cells = [outcome.state, f"{outcome.seconds:.0f}", text] if outcome else ["not run", "", "not tried yet"]
        rows.append([f"`{section.name}`", cells[0] if cells[0] == "done" else f"**{cells[0]}**", *cells[1:]])
    return markdown_table(["section", "", "seconds", ""], rows)


def numbers(results: Results) -> list[Number]:
    codecs = read(results, "codecs.csv")
    return [
        *shares(codecs),
        *rans(codecs),
        *(topk(codecs, read(results, "topk.csv")) if on_one_device(results, "kernels", "topk") else ()),
        *low_rank_step(read(results, "acp.csv")),
        *kfac(read(results, "kfac.csv")),
        *training(read(results, "training.csv")),
    ]


def shares(codecs: Rows) -> list[Number]:
    found = []
    for spec, goal in SHARES.items():
        for row in codecs:
            # Of low rank the passes over the gradient; orthogonalising a small factor is not bound by memory.
            if row["codec"] == spec and row["direction"] != "orthogonalise cols":
                share = float(row["share_of_copy"])
                what = f"`{spec}` {row['direction']}, {row['tensors']} tensors: share of copy bandwidth"
                found.append(Number(what, f"{share:.2f}", f"at least {goal:.2f}", share >= goal))
    return found


def rans(codecs: Rows) -> list[Number]:
    found = []
    for row in codecs:
        if row["codec"].startswith("rans("):
            rate = float(row["input_GB_per_s"])
            message = f"{float(row['values']) / 2**20:.0f} MiB of codes of {float(row['entropy_bits']):.2f} bits"
            what = f"`{row['codec']}` {row['direction']}, {row['tensors']} tensors, {message}: GB/s of codes"
            found.append(Number(what, f"{rate:.0f}", f"above {RANS_GB_PER_S}", rate > RANS_GB_PER_S))
    return found


def on_one_device(results: Results, *names: str) -> bool:
    devices = [results.outcomes[name].facts.get("device") for name in names if name in results.outcomes]
    return len(set(devices)) <= 1


def topk(codecs: Rows, peers: Rows) -> list[Number]:
    ours = [
        row for row in codecs if row["codec"] == EXACT_TOPK and row["direction"] == "encode" and row["tensors"] == "1"
    ]
    theirs = [row for row in peers if row["what"] == "torch.topk" and ours and row["values"] == ours[0]["values"]]
    if not (ours and theirs):
        return []
    factor = float(theirs[0]["median_us"]) / float(ours[0]["median_us"])
    what = f"`{EXACT_TOPK}` encode, {ours[0]['values']} values: times faster than torch.topk"
    return [Number(what, f"{factor:.2f}", f"at least {TOPK_TIMES}", factor >= TOPK_TIMES)]


def low_rank_step(rows: Rows) -> list[Number]:
    times = {(row["what"], row["tokens"]): float(row["median_us"]) for row in rows}
    own = times.get(("acp(rank=4) step", ""))
    hooks = [time for (what, _), time in times.items() if what.startswith("powersgd")]
    found = []
    for (what, tokens), backward in times.items():
        if what == "backward" and own is not None:
            share = own / backward
            text = f"ACP's step over a backward pass of {tokens} tokens in bf16"
            found.append(Number(text, f"{share:.3f}", f"under {STEP_SHARE}", share < STEP_SHARE))
    if own is not None and hooks:
        factor = min(hooks) / own
        text = "PowerSGD's hook over ACP's step"
        found.append(Number(text, f"{factor:.2f}", f"at least {STEP_TIMES}", factor >= STEP_TIMES))
    return found


def kfac(rows: Rows) -> list[Number]:
    times = {(row["model"], row["what"], row["who"]): float(row["median_ms"]) for row in rows}
    found = []
    for (model, what, who), own in times.items():
        peer = times.get((model, what, "torch"))
        if who == "cortado" and what in KFAC_TIMES and peer is not None:
            factor, goal = peer / own, KFAC_TIMES[what]
            text = f"K-FAC, {model}, {what}: times faster than torch's own products"
            found.append(Number(text, f"{factor:.2f}", f"at least {goal}", factor >= goal))
    return found


def training(rows: Rows) -> list[Number]:
    found = []
    for key in dict.fromkeys((row["model"], row["workers"], row["rate"]) for row in rows):
        steps = {
            row["method"]: float(row["step_ms"]) for row in rows if (row["model"], row["workers"], row["rate"]) == key
        }
        ours = {method: steps[method] for method in OURS if method in steps}
        theirs = {method: steps[method] for method in THEIRS if method in steps}
        if not (ours and theirs):
            continue
        mine, peer = min(ours, key=ours.get), min(theirs, key=theirs.get)
        factor = theirs[peer] / ours[mine]
        model, workers, rate = key
        text = f"{model}, {workers} workers, {rate}: `{mine}` faster than `{peer}`, the better of bf16 and PowerSGD"
        found.append(Number(text, f"{factor:.2f}x", "at least 1.00x", factor >= 1))
    return found


def read(results: Results, name: str) -> Rows:
    """None of a section that is not done: what lies there may be of other sources, or of another device."""
    outcome = results.outcomes.get(SECTION_OF[name])
    path = results.raw / name
    if outcome is None or outcome.state != "done" or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
