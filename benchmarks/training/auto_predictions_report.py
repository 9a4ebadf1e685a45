# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/auto_predictions.md and its pictures from the raw records of `auto.py --predictions`."""

import statistics
from pathlib import Path

from auto_report import (
    MOST_OFF,
    draw_predictions,
    errors_of,
    errors_of_tried,
    failures,
    latest_of,
    speed_of,
    write_page,
)
from tables import markdown_table

LEGEND = """\
`benchmarks/training/auto.py --predictions`: in each cell auto decides, and nothing else is measured. Predicted:
what the planner said of a setting right before the steps that count of each of its trials, for the speed expected
of the machine then, times what the other settings tried so far took over what was simulated of them, in the median
of these (records without `simulated_ns`: as simulated, in the mean, or in the first trial; up to b921ef5: for the
speed in dense steps); measured: the median of its steps on trial. As simulated: without what others took. A cell
of the second table says by how many percent the prediction was too long (+) or too short (-); what was not tried
has none. Dense steps are simulated from ready times of the steps they are compared with, and predictions of all
else are scaled by what dense steps show: so dense is counted by itself. At the machine's speed then: computation
and codecs are simulated as much slower or faster as the time from the end of a step to the first gradients of the
next one was longer or shorter on trial than the prediction expects. That part of a step is measured so, and only
the rest predicted. A trial against the setting's trials before: how far the median step of each trial but the
first is from the median of those before, in the median of a setting's trials, where it has more than one. So near
comes to a trial who has just measured the setting itself; predictions are held against all steps of a setting,
which differ less than a trial's."""


def write_predictions(records: list[dict], out: Path) -> Path:
    title = "# What auto predicts, and what is measured then"
    shown = [*latest_of(records), *(record for record in records if "failed" in record)]
    return write_page(
        shown, out / "auto_predictions.md", [title, LEGEND], section, lambda mine: "\n".join(failures(mine))
    )


def section(quality: str, records: list[dict], out: Path) -> list[str]:
    settings = settings_of(records)
    commits = sorted({record["commit"] for record in records})
    started = sorted(record["started"] for record in records)
    machines = {
        ", ".join(f"{key} {value}" for key, value in record["machine"].items() if not key.startswith("load"))
        for record in records
    }
    conditions = [
        f"- runs: {started[0]} to {started[-1]}, commit {', '.join(commits)}; {len(records)} cells",
        *(f"- {machine}" for machine in sorted(machines)),
        "- one thread a worker, pinned; a network namespace a worker",
    ]
    return [
        f"## auto(quality={quality})",
        markdown_table(["what", "off in the median", "with its sign", "predictions", "within 5 %"], summary(records)),
        f"![{quality}](auto_predictions/{draw(records, out / 'auto_predictions' / f'{quality}.png').name})",
        markdown_table(
            ["model", "link", "workers", "dense ms", "dense", *(f"`{setting}`" for setting in settings)],
            [row(record, settings) for record in records],
        ),
        "\n".join(conditions),
    ]


def summary(records: list[dict]) -> list[list[str]]:
    def line(what: str, errors: list[float]) -> list[str]:
        off = statistics.median(map(abs, errors))
        sign = 100 * statistics.median(errors)
        met = "yes" if off <= MOST_OFF else "**no**"
        return [what, f"{100 * off:.1f} %", f"{sign:+.1f} %", str(len(errors)), met]

    rates = sorted({record["rate"] for record in records}, key=speed_of)
    parts = {"settings tried": errors_of_tried(records, dense=False)}
    parts["settings tried, at the machine's speed then"] = errors_of("predicted_at_pace_ns", records)
    parts["settings tried, as simulated"] = errors_of("simulated_ns", records)
    for rate in rates:
        of_rate = [record for record in records if record["rate"] == rate]
        parts[rate] = errors_of_tried(of_rate, dense=False)
        parts[f"{rate}, at the machine's speed then"] = errors_of("predicted_at_pace_ns", of_rate)
    for setting in settings_of(records):
        parts[f"`{setting}`"] = [errors[setting] for errors in map(errors_by_setting, records) if setting in errors]
        at_pace = [errors_by_setting(record, "predicted_at_pace_ns") for record in records]
        of_setting = [errors[setting] for errors in at_pace if setting in errors]
        parts[f"`{setting}`, at the machine's speed then"] = of_setting
    parts["dense steps"] = errors_of_tried(records, dense=True)
    lines = [line(what, errors) for what, errors in parts.items() if errors]
    if trials := differences_of_trials(records):
        off = f"{100 * statistics.median(trials):.1f} %"
        lines.append(["beside it: a trial against the setting's trials before", off, "", str(len(trials)), "-"])
    return lines


def differences_of_trials(records: list[dict]) -> list[float]:
    """Of each setting with more than one trial: how far a trial is from the median of those before, in the median."""
    differences = []
    for record in records:
        for candidate in record["decided"]["decision"]["candidates"][1:]:
            trials_ns = candidate.get("trials_ns", [])
            before = [statistics.median(trials_ns[:place]) for place in range(1, len(trials_ns))]
            own = [abs(known / new - 1) for known, new in zip(before, trials_ns[1:], strict=True)]
            differences += [statistics.median(own)] if own else []
    return differences


def setting_of(candidate: dict) -> str:
    return "plan" if candidate["label"].startswith("plan(") else candidate["label"]


def errors_by_setting(record: dict, prediction: str = "predicted_ns") -> dict[str, float]:
    """Of what was tried, dense left out: by how much the prediction was too long."""
    return {
        setting_of(candidate): candidate[prediction] / candidate["measured_ns"] - 1
        for candidate in record["decided"]["decision"]["candidates"][1:]
        if candidate.get(prediction) and candidate["measured_ns"]
    }


def settings_of(records: list[dict]) -> list[str]:
    """Those that were tried most often first."""
    tried = [setting for record in records for setting in errors_by_setting(record)]
    return sorted(set(tried), key=lambda setting: (-tried.count(setting), setting))


def row(record: dict, settings: list[str]) -> list[str]:
    dense = record["decided"]["decision"]["candidates"][0]
    errors = errors_by_setting(record)
    return [
        record["model"],
        record["rate"],
        str(record["workers"]),
        f"{dense['measured_ns'] / 1e6:.0f}",
        f"{100 * (dense['predicted_ns'] / dense['measured_ns'] - 1):+.0f}" if dense["predicted_ns"] else "",
        *(f"{100 * errors[setting]:+.0f}" if setting in errors else "" for setting in settings),
    ]


def draw(records: list[dict], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 5.5), layout="constrained")
    draw_predictions(axis, records)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
