# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/auto.md and its pictures from the raw records of `auto.py`."""

import itertools
import math
import statistics
from pathlib import Path

from links import LOOPBACK, UNSHAPED, is_namespaced, parse_rate_bits_per_s
from tables import markdown_table

QUALITIES = ("safe", "balanced", "aggressive")
MODELS, RATES, WORKERS = ("gpt", "mlp", "vgg"), ("100mbit", "1gbit", UNSHAPED), (2, 3, 4, 5)  # the whole sweep
MOST_SLOWER = 1.03  # auto over its best rival
MOST_OFF = 0.05  # median error of the predictions
LEGEND = """\
Auto decides first: dense steps, links and codecs measured, some settings tried. Then every rival is measured in
rotation, going on from auto's weights, and the fastest chosen (those far behind stay out of later rounds; in records
of before commit 6037fcd, those 15 % behind in the first), and then auto and that rival again, in alternation, both
from auto's weights: "auto ms" and "best rival ms" are medians over rounds of a round's median step of that second set,
and "auto / rival" is the median of the ratios of single rounds, with the least and the greatest. A cell is slower
beyond noise where even the lower end of the 95 % interval of that median is above 1.03 (order statistics of the rounds'
ratios; it takes six rounds at least). A cell that was measured more than once has one row over the rounds of all its
runs, and the median of each run behind it. "Was a rival, too": auto ran a setting that is a rival itself, and another
one was chosen as the fastest. A ratio well below 1 there says that the rival chosen was not the best. "Given up": auto
went back to measuring or to trials while it was compared, so some of its steps were not the setting's: it has no error,
and those blocks (of records that do not say which, all of auto's) count for no prediction.
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
    """Without root nothing is shaped, and workers share the loopback: that is another cell than one over links."""
    where = () if is_namespaced(record) else (LOOPBACK,)
    return record["quality"], record["model"], record["rate"], record["workers"], *where


def speed_of(rate: str) -> float:
    """Slow links first, the unshaped one last."""
    bits = parse_rate_bits_per_s(rate)
    return math.inf if bits is None else bits


def order_of(record: dict) -> tuple:
    return record["model"], speed_of(record["rate"]), record["workers"]


def write_report(records: list[dict], out: Path) -> Path:
    """Every record of a cell counts: measuring a bad one again must not make it go away."""

    parts = ["# Auto against the best it may use", LEGEND]
    return write_page(records, out / "auto.md", parts, section, gaps)


def measured(records: list[dict]) -> list[dict]:
    """Without those of cells that failed."""
    return [record for record in records if "failed" not in record]


def gaps(records: list[dict]) -> str:
    """Which cells of the sweep are not there, and which have failed, of the records of a quality level."""
    done = {key_of(record)[1:] for record in measured(records)}
    missing: dict[str, list[str]] = {}
    for model, rate, workers in itertools.product(MODELS, RATES, WORKERS):
        if (model, rate, workers) not in done:
            missing.setdefault(f"{model} {rate}", []).append(str(workers))
    total = len(MODELS) * len(RATES) * len(WORKERS)
    lines = [f"All {total} cells of the sweep were measured."]
    if missing:
        named = "; ".join(f"{name}, {', '.join(workers)} workers" for name, workers in missing.items())
        lines = [f"Of the {total} cells of the sweep {sum(map(len, missing.values()))} were not measured: {named}."]
    return "\n".join([*lines, *failures(records)])


def failures(records: list[dict]) -> list[str]:
    """A line for each cell that failed, measured again later or not."""
    return [
        f"Failed: {record['model']}, {record['rate']}, {record['workers']} workers, {record['started']}: "
        f"{record['failed']}."
        for record in records
        if "failed" in record
    ]


def latest_of(records: list[dict]) -> list[dict]:
    """The latest record of each cell."""
    return list({key_of(record): record for record in measured(records)}.values())


def write_page(records: list[dict], path: Path, parts: list[str], make_section, gaps_of) -> Path:
    """A section a quality level behind `parts`, of the cells that were measured, and `gaps_of` those that were not."""
    for quality in QUALITIES:
        mine = [record for record in records if record["quality"] == quality]
        if done := sorted(measured(mine), key=order_of):
            parts += make_section(quality, done, path.parent)
        elif mine:
            parts.append(f"## auto(quality={quality})")
        if mine and (text := gaps_of(mine)):
            parts.append(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    return path


def cells_of(records: list[dict]) -> list[list[dict]]:
    """The records of each cell, its runs, oldest first."""
    cells: dict[tuple, list[dict]] = {}
    for record in records:
        cells.setdefault(key_of(record), []).append(record)
    return list(cells.values())


def section(quality: str, records: list[dict], out: Path) -> list[str]:
    picture = draw(records, out / "auto" / f"{quality}.png")
    reasons = [
        f"- {r['model']}, {r['rate']}, {r['workers']} workers: {r['decided']['decision']['reason']}" for r in records
    ]
    return [
        f"## auto(quality={quality})",
        markdown_table(["asked", "found", "met"], verdicts(records)),
        f"![{quality}](auto/{picture.name})",
        markdown_table(HEADER, [row(cell) for cell in cells_of(records)]),
        "What it said:",
        "\n".join(reasons),
        "\n".join(conditions(records)),
    ]


def met(yes: bool) -> str:
    return "yes" if yes else "**no**"


def verdicts(records: list[dict]) -> list[list[str]]:
    cells = cells_of(records)
    seconds = [sum(record["decided"]["measuring_steps_ms"]) / 1e3 for record in records]
    return [
        *verdicts_of_speed(cells),
        *verdicts_of_predictions(records),
        *verdicts_of_choices(cells),
        ["time until the decision", f"{statistics.median(seconds):.0f} s, at most {max(seconds):.0f} s", "-"],
    ]


def verdicts_of_speed(cells: list[list[dict]]) -> list[list[str]]:
    ratios = {key_of(cell[0])[1:]: pooled_ratios(cell) for cell in cells}
    medians = {name: statistics.median(those) for name, those in ratios.items()}
    slower = [name for name, median in medians.items() if median > MOST_SLOWER]
    same = {
        key_of(cell[0])[1:] for cell in cells if all(chosen_of(run)["label"] == run["rival"]["method"] for run in cell)
    }
    lowest = {name: lowest_median(those) for name, those in ratios.items()}
    certain = [" ".join(map(str, name)) for name, low in lowest.items() if low > MOST_SLOWER]
    told = sum(low > -math.inf for low in lowest.values())
    rows = [
        [
            "never slower than the best rival by more than 3 %",
            f"{len(slower)} of {len(ratios)} cells slower, the worst {max(medians.values()):.2f}, in "
            f"{len(same.intersection(slower))} of them with the same setting as the rival; beyond noise {len(certain)} "
            f"of the {told} with rounds enough to tell{': ' * bool(certain)}{', '.join(certain)}",
            met(not slower),
        ]
    ]
    again = [(key_of(run)[1:], median_of([run])) for cell in cells if len(cell) > 1 for run in cell]
    if again:
        above = [f"{' '.join(map(str, name))}: {median:.3f}" for name, median in again if median > MOST_SLOWER]
        found = f"{len(above)} of {len(again)}{': ' * bool(above)}{', '.join(above)}"
        rows.append(["beside it: single runs above 1.03, of cells that were measured more than once", found, "-"])
    return rows


def verdicts_of_predictions(records: list[dict]) -> list[list[str]]:
    errors = {
        "settings tried": errors_of_tried(records, dense=False),
        "settings tried, at the machine's speed then": errors_of("predicted_at_pace_ns", records),
        "settings tried, as simulated": errors_of("simulated_ns", records),
        "settings tried, all their blocks": errors_over_all_blocks(records),
        "dense steps": errors_of_tried(records, dense=True),
        "the setting chosen, in the second set": errors_of_chosen(records),
    }

    def found(those: list[float]) -> str:
        median, largest = statistics.median(map(abs, those)), max(map(abs, those))
        return f"{100 * median:.1f} % over {len(those)}, at most {100 * largest:.0f} %"

    rows = [
        [f"predicted within 5 % (median): {what}", found(those), met(statistics.median(map(abs, those)) <= MOST_OFF)]
        for what, those in errors.items()
        if those
    ]
    repeated = [difference for record in records for difference in differences_of_repeats(record)]
    beside = {
        "settings tried, without what all of a cell are off by (median)": errors_within_cells(records),
        "a setting tried, measured again as a rival (median difference)": repeated,
    }
    return rows + [[f"beside it: {what}", found(those), "-"] for what, those in beside.items() if those]


def verdicts_of_choices(cells: list[list[dict]]) -> list[list[str]]:
    rows = []
    unshaped = [cell for cell in cells if cell[0]["rate"] == UNSHAPED]
    declined = [cell for cell in unshaped if all(run["decided"]["decision"]["chosen"] == 0 for run in cell)]
    if unshaped:
        found = f"{len(declined)} of {len(unshaped)} cells"
        rows.append(["declines on the unshaped links", found, met(len(declined) == len(unshaped))])
    for what, is_so in (
        ("auto's own setting was a rival, too, and another one was chosen", was_passed_over),
        ("auto gave its setting up while it was compared", gave_up),
    ):
        if those := [cell for cell in cells if any(map(is_so, cell))]:
            named = (f"{' '.join(map(str, key_of(cell[0])[1:]))}: {median_of(cell):.2f}" for cell in those)
            found = f"{len(those)} of {len(cells)} cells (auto / rival): {', '.join(named)}"
            rows.append([f"beside it: {what}", found, "-"])
    return rows


def conditions(records: list[dict]) -> list[str]:
    started = sorted(record["started"] for record in records)
    commits = sorted({record["commit"] for record in records})
    machines = {
        ", ".join(f"{key} {value}" for key, value in record["machine"].items() if not key.startswith("load"))
        for record in records
    }
    loads = sorted(float(record["machine"].get("load at start", "nan")) for record in records)
    choosing = sorted({record["choosing_rounds"] for record in records})
    cells = len(cells_of(records))
    runs = f"{cells} cells" + (f", {len(records)} runs of them" if len(records) > cells else "")
    steps = sorted(len(block["steps_ms"]) for record in records for block in record["blocks"])
    rounds = sorted(record["rounds"] for record in records)
    rounds_text = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    return [
        f"- runs: {started[0]} to {started[-1]}, commit {', '.join(commits)}; {runs}",
        *(f"- {machine}, load at start {loads[0]:g} to {loads[-1]:g}" for machine in sorted(machines)),
        f"- links: {'; '.join(sorted({record['links'] for record in records}))}",
        f"- one thread a worker, pinned; {steps[0]} to {steps[-1]} timed steps a block after an untimed one,"
        f" {' or '.join(map(str, choosing))} rounds to choose, {rounds_text} to compare",
    ]


def dense_of(record: dict) -> dict:
    return record["decided"]["decision"]["candidates"][0]


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


def pooled_ratios(cell: list[dict]) -> list[float]:
    """Of all rounds of all runs of a cell."""
    return [ratio for run in cell for ratio in round_ratios(run)]


def median_of(cell: list[dict]) -> float:
    return statistics.median(pooled_ratios(cell))


def blocks_ms(cell: list[dict], name_of) -> list[float]:
    """Of the second set: the blocks of the method that `name_of` gives for each run of a cell."""
    return [
        block["step_ms"]
        for run in cell
        for block in run["blocks"]
        if block["set"] == "comparing" and block["method"] == name_of(run)
    ]


def holds(record: dict, now: dict | None) -> bool:
    """Whether auto still runs what it had decided. What does not say it is taken to."""
    if not now:
        return True
    label = now["candidates"][now["chosen"]]["label"] if "candidates" in now else now["chosen"]
    step = record["decided"]["decision"].get("step")
    return now["decided"] and label == chosen_of(record)["label"] and now.get("step", step) == step


def gave_up(record: dict) -> bool:
    """Whether auto left its decision within the comparison. A record without that of each block says only what was so
    at the end."""
    states = [block.get("auto") for block in record["blocks"] if block["method"] == record["auto"]]
    return not all(holds(record, state) for state in [*states, record["result"].get("decision")])


def blocks_of_setting_ms(record: dict) -> list[float]:
    """Auto's blocks in which it ran the setting it had chosen; none where that is not known of a record."""
    blocks = [block for block in record["blocks"] if block["method"] == record["auto"]]
    if gave_up(record):
        blocks = [block for block in blocks if "auto" in block and holds(record, block["auto"])]
    return [block["step_ms"] for block in blocks]


def own_rival(record: dict) -> str:
    """The rival that is the same as what auto chose, where there is one."""
    label = chosen_of(record)["label"]
    return "ddp" if label == "dense" else label


def was_passed_over(record: dict) -> bool:
    """Whether auto runs what is a rival itself, and another rival was chosen as the fastest."""
    return own_rival(record) in record["rival"]["first_ms"] and own_rival(record) != record["rival"]["method"]


def lowest_median(values: list[float]) -> float:
    """The lower end of the 95 % interval of the median; of too few values, minus infinity.

    The median is below the k-th smallest of n values with probability P(at most k - 1 heads of n)."""
    below, place = 0.0, 0
    while (below := below + math.comb(len(values), place) / 2 ** len(values)) <= 0.025:
        place += 1
    return sorted(values)[place - 1] if place else -math.inf


def row(cell: list[dict]) -> list[str]:
    """Of all runs of a cell; what was decided, and how near it was predicted, of each."""
    ratios, auto_ms = pooled_ratios(cell), blocks_ms(cell, lambda run: run["auto"])
    rival_ms = blocks_ms(cell, lambda run: run["rival"]["method"])
    each = "" if len(cell) == 1 else f"; {len(cell)} runs: {', '.join(f'{median_of([run]):.3f}' for run in cell)}"
    steps_ms = [run["decided"]["measuring_steps_ms"] for run in cell]
    return [
        cell[0]["model"],
        cell[0]["rate"] + ("" if is_namespaced(cell[0]) else " (loopback)"),
        str(cell[0]["workers"]),
        in_each(cell, described_choice),
        f"{statistics.median(auto_ms):.0f}",
        in_each(cell, described_rival),
        f"{statistics.median(rival_ms):.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}){each}",
        in_each(cell, lambda run: "-" if gave_up(run) else f"{run['result']['error']:.3f}"),
        in_each(cell, lambda run: share(chosen_of(run)["predicted_ns"], chosen_of(run)["measured_ns"])),
        in_each(cell, lambda run: share(dense_of(run)["predicted_ns"], dense_of(run)["measured_ns"])),
        "; ".join(f"{len(those)} steps, {sum(those) / 1e3:.1f} s" for those in steps_ms),
    ]


def in_each(cell: list[dict], text_of) -> str:
    """What holds for each run; once where it is the same."""
    return "; ".join(dict.fromkeys(map(text_of, cell)))


def described_choice(record: dict) -> str:
    unequal = " **replicas differ**" if record["result"]["replicas_equal"] is False else ""
    return f"`{chosen_of(record)['label']}`{', given up' if gave_up(record) else ''}{unequal}"


def described_rival(record: dict) -> str:
    passed_over = f" (`{own_rival(record)}` was a rival, too)" if was_passed_over(record) else ""
    return f"`{record['rival']['method']}`{passed_over}"


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
        predicted_ns, own_ms = chosen_of(record)["predicted_ns"], blocks_of_setting_ms(record)
        if predicted_ns and own_ms:
            errors.append(predicted_ns / 1e6 / statistics.median(own_ms) - 1)
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
            own_ms = [block["step_ms"] for block in record["blocks"] if block["method"] == candidate["label"]]
            own_ms += blocks_of_setting_ms(record) if candidate == chosen_of(record) else []
            measured_ms = statistics.median([candidate["measured_ns"] / 1e6, *own_ms])
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
    from matplotlib import ticker

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
        for side in (axis.xaxis, axis.yaxis):  # 500, 1000, 2000: labels of all minor ticks lie upon each other
            side.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            side.set_minor_formatter(ticker.NullFormatter())
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
        1, 2, figsize=(11, max(4.5, 1.2 + 0.2 * len(cells_of(records)))), layout="constrained"
    )
    draw_predictions(left, records)
    cells = cells_of(records)
    for place, cell in enumerate(cells):
        ratios = pooled_ratios(cell)
        colour = COLOURS.get(cell[0]["model"])
        right.plot([min(ratios), max(ratios)], [place, place], color=colour, linewidth=1.5)
        right.plot(statistics.median(ratios), place, "o", color=colour, markersize=4)
    right.axvline(MOST_SLOWER, color="#b00020", linewidth=1, linestyle="--")
    right.axvline(1, color="#888888", linewidth=1)
    labels = [", ".join(map(str, key_of(cell[0])[1:])) for cell in cells]
    right.set_yticks(range(len(cells)), labels, fontsize=7)
    right.invert_yaxis()
    right.set(xlabel="auto over its best rival, median and range of rounds", title="1.03 dashed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
