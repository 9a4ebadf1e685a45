# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/auto.md and its pictures from the raw records of `auto.py`."""

import math
import statistics
from pathlib import Path

from links import UNSHAPED, parse_rate_bits_per_s
from tables import markdown_table

QUALITIES = ("safe", "balanced", "aggressive")
MOST_SLOWER = 1.03  # auto over its best rival
MOST_OFF = 0.05  # median error of the predictions
LEGEND = """\
Auto decides first: dense steps, links and codecs measured, some settings tried. Then every rival is measured in
rotation, going on from auto's weights, and the fastest chosen (those far behind after the first round stay out of the
others), and then auto and that rival again, in alternation, both from auto's weights: "auto ms" and "best rival ms"
are medians over rounds of a round's median step of that second set, and "auto / rival" is the median of the ratios of
single rounds, with the least and the greatest. A cell is slower beyond noise where even the lower end of the 95 %
interval of that median is above 1.03 (order statistics of the rounds' ratios; it takes six rounds at least).
Rivals: DDP, the bf16 hook, each fixed setting that the quality level allows; at aggressive also PyTorch's PowerSGD
hook at rank 1, 2, 4. Predicted: what the planner said of the chosen setting (and of dense) before it was tried; of
settings, simulated for the speed expected of the machine then, times what the other settings tried so far took over
what was simulated of them; as simulated: without these (in a record without `simulated_ns`, predicted is as
simulated); measured beside it: the median of its steps on trial. Dense steps are simulated from ready times of the
steps they are compared with, and predictions of all else are scaled by what dense steps show: so dense has a row of
its own. Measured again: the same setting in the same cell, its median on trial against its median when rivals were
chosen, minutes later (a payload that shrinks as training goes on differs by that, too).
All their blocks: the prediction against the median of a setting's blocks in its cell, that on trial, those as a rival
and, if it was chosen, those as auto, as far as there are any: a spell of a machine whose speed changes is in one of
them. Without what all of a cell are off by: how far the error of each setting tried, as simulated, is from the median
of the others' in its cell, where it has three or more. What they have in common is mostly the machine, whose speed is
another one when it is measured than when settings are tried. At the machine's speed then: what auto told when it
decided. The time from the end of a step to the first gradients of the next, about the same whatever travels, tells how
fast the machine was on trial, in comparison with what the prediction expects. Computation and codecs are simulated as
much slower or faster, links are not: that part of a step is measured, and only the rest predicted. Error: share (L2)
of gradient plus residual that a step of auto held back. Measuring: steps until the decision, and their time."""
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
COLOURS = {"gpt": "#4c72b0", "mlp": "#dd8452", "vgg": "#55a868"}


def key_of(record: dict) -> tuple:
    return record["quality"], record["model"], record["rate"], record["workers"]


def speed_of(rate: str) -> float:
    """Slow links first, the unshaped one last."""
    bits = parse_rate_bits_per_s(rate)
    return math.inf if bits is None else bits


def order_of(record: dict) -> tuple:
    return record["model"], speed_of(record["rate"]), record["workers"]


def write_report(records: list[dict], out: Path) -> Path:
    return write_page(records, out / "auto.md", ["# Auto against the best it may use", LEGEND], section)


def write_page(records: list[dict], path: Path, parts: list[str], make_section) -> Path:
    """A section a quality level behind `parts`. The latest record of each cell counts."""
    latest = {key_of(record): record for record in records}
    for quality in QUALITIES:
        mine = sorted((record for record in latest.values() if record["quality"] == quality), key=order_of)
        if mine:
            parts += make_section(quality, mine, path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    return path


def section(quality: str, records: list[dict], out: Path) -> list[str]:
    picture = draw(records, out / "auto" / f"{quality}.png")
    reasons = [
        f"- {r['model']}, {r['rate']}, {r['workers']} workers: {r['decided']['decision']['reason']}" for r in records
    ]
    return [
        f"## auto(quality={quality})",
        markdown_table(["asked", "found", "met"], verdicts(records)),
        f"![{quality}](auto/{picture.name})",
        markdown_table(HEADER, [row(record) for record in records]),
        "What it said:",
        "\n".join(reasons),
        "\n".join(conditions(records)),
    ]


def verdicts(records: list[dict]) -> list[list[str]]:
    def met(yes: bool) -> str:
        return "yes" if yes else "**no**"

    ratios = [statistics.median(round_ratios(record)) for record in records]
    slower = [ratio for ratio in ratios if ratio > MOST_SLOWER]
    same = sum(
        ratio > MOST_SLOWER and chosen_of(record)["label"] == record["rival"]["method"]
        for ratio, record in zip(ratios, records, strict=True)
    )
    lowest = {key_of(record)[1:]: lowest_median(round_ratios(record)) for record in records}
    certain = [" ".join(map(str, cell)) for cell, low in lowest.items() if low > MOST_SLOWER]
    told = sum(low > -math.inf for low in lowest.values())
    errors = {
        "settings tried": errors_of_tried(records, dense=False),
        "settings tried, at the machine's speed then": errors_of("predicted_at_pace_ns", records),
        "settings tried, as simulated": errors_of("simulated_ns", records),
        "settings tried, all their blocks": errors_over_all_blocks(records),
        "dense steps": errors_of_tried(records, dense=True),
        "the setting chosen, in the second set": errors_of_chosen(records),
    }
    rows = [
        [
            "never slower than the best rival by more than 3 %",
            f"{len(slower)} of {len(ratios)} cells slower, the worst {max(ratios):.2f}, in {same} of them with the "
            f"same setting as the rival; beyond noise {len(certain)} "
            f"of the {told} with rounds enough to tell{': ' * bool(certain)}{', '.join(certain)}",
            met(not slower),
        ]
    ]
    for what, those in errors.items():
        if those:
            median, largest = statistics.median(map(abs, those)), max(map(abs, those))
            found = f"{100 * median:.1f} % over {len(those)}, at most {100 * largest:.0f} %"
            rows.append([f"predicted within 5 % (median): {what}", found, met(median <= MOST_OFF)])
    within = errors_within_cells(records)
    if within:
        found = f"{100 * statistics.median(within):.1f} % over {len(within)}, at most {100 * max(within):.0f} %"
        rows.append(["beside it: settings tried, without what all of a cell are off by (median)", found, "-"])
    repeated = [difference for record in records for difference in differences_of_repeats(record)]
    if repeated:
        found = f"{100 * statistics.median(repeated):.1f} % over {len(repeated)}, at most {100 * max(repeated):.0f} %"
        rows.append(["beside it: a setting tried, measured again as a rival (median difference)", found, "-"])
    unshaped = [record for record in records if record["rate"] == UNSHAPED]
    declined = [record for record in unshaped if record["decided"]["decision"]["chosen"] == 0]
    if unshaped:
        found = f"{len(declined)} of {len(unshaped)} cells"
        rows.append(["declines on the unshaped links", found, met(len(declined) == len(unshaped))])
    seconds = [sum(record["decided"]["measuring_steps_ms"]) / 1e3 for record in records]
    rows.append(["time until the decision", f"{statistics.median(seconds):.0f} s, at most {max(seconds):.0f} s", "-"])
    return rows


def conditions(records: list[dict]) -> list[str]:
    started = sorted(record["started"] for record in records)
    commits = sorted({record["commit"] for record in records})
    last = records[-1]
    steps = sorted(len(block["steps_ms"]) for record in records for block in record["blocks"])
    rounds = sorted(record["rounds"] for record in records)
    return [
        f"- runs: {started[0]} to {started[-1]}, commit {', '.join(commits)}; {len(records)} cells",
        "- " + ", ".join(f"{key} {value}" for key, value in last["machine"].items()),
        f"- links: {last['links'].replace(last['rate'], 'shaped')}; one thread a worker, pinned",
        f"- {steps[0]} to {steps[-1]} timed steps a block after an untimed one, {last['choosing_rounds']} rounds to"
        f" choose, {rounds[0]}{f' to {rounds[-1]}' if rounds[0] != rounds[-1] else ''} to compare",
    ]


def chosen_of(record: dict) -> dict:
    decision = record["decided"]["decision"]
    return decision["candidates"][decision["chosen"]]


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


def lowest_median(values: list[float]) -> float:
    """The lower end of the 95 % interval of the median; of too few values, minus infinity.

    The median is below the k-th smallest of n values with probability P(at most k - 1 heads of n)."""
    below, place = 0.0, 0
    while (below := below + math.comb(len(values), place) / 2 ** len(values)) <= 0.025:
        place += 1
    return sorted(values)[place - 1] if place else -math.inf


def row(record: dict) -> list[str]:
    dense, chosen = record["decided"]["decision"]["candidates"][0], chosen_of(record)
    times, rival = record["result"]["times_ms"], record["rival"]["method"]
    ratios = round_ratios(record)
    steps_ms = record["decided"]["measuring_steps_ms"]
    unequal = " **replicas differ**" if record["result"]["replicas_equal"] is False else ""
    return [
        record["model"],
        record["rate"],
        str(record["workers"]),
        f"`{chosen['label']}`{unequal}",
        f"{times[record['auto']]:.0f}",
        f"`{rival}`",
        f"{times[rival]:.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        f"{record['result']['error']:.3f}",
        share(chosen["predicted_ns"], chosen["measured_ns"]),
        share(dense["predicted_ns"], dense["measured_ns"]),
        f"{len(steps_ms)} steps, {sum(steps_ms) / 1e3:.1f} s",
    ]


def predictions(record: dict) -> list[tuple[float, float]]:
    """Predicted and measured ms of every candidate that was predicted and tried, dense first."""
    return pairs_of(record["decided"]["decision"]["candidates"])


def pairs_of(candidates: list[dict]) -> list[tuple[float, float]]:
    return [
        (candidate["predicted_ns"] / 1e6, candidate["measured_ns"] / 1e6)
        for candidate in candidates
        if candidate["predicted_ns"] and candidate["measured_ns"]
    ]


def errors_of_tried(records: list[dict], dense: bool) -> list[float]:
    """Of the dense steps, or of all else that was tried: by how much predictions were too long."""
    part = slice(0, 1) if dense else slice(1, None)
    pairs = (pair for record in records for pair in pairs_of(record["decided"]["decision"]["candidates"][part]))
    return [predicted / measured - 1 for predicted, measured in pairs]


def errors_of(prediction: str, records: list[dict]) -> list[float]:
    """As errors_of_tried(), without dense, of `predicted_at_pace_ns` or `simulated_ns`, where a record has it."""
    return [
        candidate[prediction] / candidate["measured_ns"] - 1
        for record in records
        for candidate in record["decided"]["decision"]["candidates"][1:]
        if candidate.get(prediction) and candidate["measured_ns"]
    ]


def errors_of_chosen(records: list[dict]) -> list[float]:
    errors = []
    for record in records:
        predicted_ns = chosen_of(record)["predicted_ns"]
        if predicted_ns:
            errors.append(predicted_ns / 1e6 / record["result"]["times_ms"][record["auto"]] - 1)
    return errors


def errors_within_cells(records: list[dict]) -> list[float]:
    """How far the error of each setting tried is from the median of the others' in its cell, where it has three."""
    distances = []
    for record in records:
        errors = errors_of("simulated_ns", [record]) or errors_of_tried([record], dense=False)
        if len(errors) >= 3:
            for place, error in enumerate(errors):
                distances.append(abs(error - statistics.median(errors[:place] + errors[place + 1 :])))
    return distances


def errors_over_all_blocks(records: list[dict]) -> list[float]:
    """As errors_of_tried(), without dense, against the median of all blocks of a setting in its cell."""
    errors = []
    for record in records:
        for candidate in record["decided"]["decision"]["candidates"][1:]:
            if not (candidate["predicted_ns"] and candidate["measured_ns"]):
                continue
            names = {candidate["label"]} | ({record["auto"]} if candidate == chosen_of(record) else set())
            blocks_ms = [block["step_ms"] for block in record["blocks"] if block["method"] in names]
            measured_ms = statistics.median([candidate["measured_ns"] / 1e6, *blocks_ms])
            errors.append(candidate["predicted_ns"] / 1e6 / measured_ms - 1)
    return errors


def differences_of_repeats(record: dict) -> list[float]:
    """How far a setting's steps on trial were from those it took as a rival, dense left out: as near as predictions can
    be seen to come."""
    as_rivals_ms = record["rival"]["first_ms"]
    return [
        abs(candidate["measured_ns"] / 1e6 / as_rivals_ms[candidate["label"]] - 1)
        for candidate in record["decided"]["decision"]["candidates"][1:]
        if candidate["measured_ns"] and candidate["label"] in as_rivals_ms
    ]


def draw_predictions(axis, records: list[dict]) -> None:
    for model in sorted({record["model"] for record in records}):
        pairs = [pair for record in records if record["model"] == model for pair in predictions(record)]
        if pairs:
            axis.scatter(*zip(*pairs, strict=True), s=18, label=model, color=COLOURS.get(model), alpha=0.8)
    ends = [value for record in records for pair in predictions(record) for value in pair]
    if ends:
        line = [min(ends) * 0.9, max(ends) * 1.1]
        axis.plot(line, line, color="#888888", linewidth=1)
        axis.fill_between(line, [x * 0.95 for x in line], [x * 1.05 for x in line], color="#888888", alpha=0.25)
        axis.set(xscale="log", yscale="log")
    axis.set(
        xlabel="predicted, ms a step", ylabel="measured on trial, ms a step", title="Every setting tried; ±5 % grey"
    )
    axis.legend(frameon=False)


def draw(records: list[dict], path: Path) -> Path:
    """Predicted over measured times, and auto over its best rival."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, max(4.5, 1.2 + 0.2 * len(records))), layout="constrained"
    )
    draw_predictions(left, records)
    for place, record in enumerate(records):
        ratios = round_ratios(record)
        colour = COLOURS.get(record["model"])
        right.plot([min(ratios), max(ratios)], [place, place], color=colour, linewidth=1.5)
        right.plot(statistics.median(ratios), place, "o", color=colour, markersize=4)
    right.axvline(MOST_SLOWER, color="#b00020", linewidth=1, linestyle="--")
    right.axvline(1, color="#888888", linewidth=1)
    labels = [f"{record['model']}, {record['rate']}, {record['workers']}" for record in records]
    right.set_yticks(range(len(records)), labels, fontsize=7)
    right.invert_yaxis()
    right.set(xlabel="auto over its best rival, median and range of rounds", title="1.03 dashed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
