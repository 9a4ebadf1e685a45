# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/quality.md and accuracy.md from the raw records of `quality.py` and `accuracy.py`."""

import statistics
from pathlib import Path

from tables import markdown_table, megabytes

DENSE = "ddp"
POWER = "powersgd(rank=4)"
NOISE_STDS = 2.0
FEWEST_SEEDS = 3  # that both have: of two the deviation says next to nothing
SHARE_OF_FALL = 0.02
HEADER = [
    "method",
    "MB/step",
    "ratio",
    "error",
    "training loss",
    "validation loss",
    "accuracy",
    "against DDP",
    "against PowerSGD r4",
    "steps at equal time",
    "validation loss then",
    "against PowerSGD r4 then",
]
LEGEND = f"""\
Losses: mean and standard deviation over the seeds; training: mean of the last 10 steps; validation: on
held-out data. A seed fixes weights and batches for all methods. MB/step: sent on one worker's interface
(marked p: payload handed to the collectives). Ratio: DDP's bytes over the method's, reached at the error
beside it (share, L2, of gradient plus residual that a step held back). Against: mean difference of the
validation loss (negative is better) and verdict. Equal time: the steps a method makes while PowerSGD makes
its own, by the step times that speed.jsonl had at the rate named below when the run was measured.
A method is *within noise* when its mean is worse by at most {NOISE_STDS:g} pooled standard deviations AND
by at most {100 * SHARE_OF_FALL:g} % of the fall of the baseline's loss over the run; *better* when it is better by more
than {NOISE_STDS:g} pooled standard deviations; otherwise *worse*. A verdict takes
{FEWEST_SEEDS} seeds that both have."""


def verdict(mine: list[dict], baseline: list[dict], field: str = "validation_loss") -> tuple[float, str]:
    """Difference of the mean validation losses, and `better`, `within noise` or `worse`."""
    own, other = _values(mine, field), _values(baseline, "validation_loss")
    worse_by = statistics.mean(own) - statistics.mean(other)
    pooled = ((statistics.variance(own) + statistics.variance(other)) / 2) ** 0.5
    initial = statistics.mean(_values(baseline, "initial_validation_loss"))
    fall = initial - statistics.mean(other)
    if worse_by < -NOISE_STDS * pooled:
        return worse_by, "better"
    within = worse_by <= NOISE_STDS * pooled and worse_by <= SHARE_OF_FALL * fall
    return worse_by, "within noise" if within else "worse"


def write_report(records: list[dict], path: Path, title: str, wanted: dict[str, list[str]] | None = None) -> Path:
    """One table for each task, number of steps, of workers and rate of the step times for equal time. `wanted`: the
    methods that each task is to be measured with."""
    in_order = sorted(records, key=lambda record: (record["task"], record["steps"], record["workers"]))
    parts = [f"# {title}", LEGEND]
    parts += [section(heading, group) for heading, group in groups_of(in_order).items()]
    parts += [text for name, methods in (wanted or {}).items() if (text := missing(name, methods, records))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    return path


def groups_of(records: list[dict]) -> dict[str, dict[str, dict[int, dict]]]:
    """What belongs into one table, by its heading: by method and seed, of which a later record replaces an earlier one.
    The heading names the rate where there are several."""
    groups: dict[tuple, dict] = {}
    for record in records:
        key = (record["task"], record["steps"], record["workers"])
        group = groups.setdefault(key, {}).setdefault(record.get("equal_time_rate"), {})
        group.setdefault(record["method"], {})[record["seed"]] = record
    return {
        f"{task}; {steps} steps, {workers} workers" + f", equal time at {rate}" * (len(by_rate) > 1): group
        for (task, steps, workers), by_rate in groups.items()
        for rate, group in by_rate.items()
    }


def missing(task_name: str, wanted: list[str], records: list[dict]) -> str:
    """Which methods have too few seeds for a verdict."""
    seeds = {method: set() for method in wanted}
    for record in records:
        if record["task_name"] == task_name and record["method"] in seeds:
            seeds[record["method"]].add(record["seed"])
    few = [
        f"`{name}`" + f" ({len(s)} of {FEWEST_SEEDS} seeds)" * bool(s)
        for name, s in seeds.items()
        if len(s) < FEWEST_SEEDS
    ]
    if not few:
        return ""
    return f"Not measured yet, task `{task_name}`, {len(few)} of {len(wanted)} methods: {', '.join(few)}."


def section(heading: str, group: dict[str, dict[int, dict]]) -> str:
    methods = {name: list(by_seed.values()) for name, by_seed in group.items()}
    sample = next(iter(methods.values()))[0]
    runs = [run for of_method in methods.values() for run in of_method]
    started = sorted(run["started"] for run in runs)
    loads = sorted(float(run["machine"].get("load at start", "nan")) for run in runs)
    commits = {run.get("commit", "unknown") for run in runs}
    machine = ", ".join(f"{key} {value}" for key, value in sample["machine"].items() if key != "load at start")
    links = "; ".join(sorted({run["links"] for run in runs}))
    rate = sample.get("equal_time_rate")
    has_equal_time = any(run.get("equal_time_validation_loss") is not None for run in runs)
    head = (
        f"{len(runs)} runs from {started[0]} to {started[-1]}, of {len(commits)} commits (of each run in the .jsonl), "
        f"load at start {loads[0]:g} to {loads[-1]:g}; {machine}; links: {links}"
        + (f"; equal time at {rate}" if has_equal_time else "")
    )
    columns = zip(HEADER, *(row(name, runs, methods) for name, runs in methods.items()), strict=True)
    header, *rows = zip(*(column for column in columns if set(column[1:]) != {"-"}), strict=True)
    return "\n\n".join([f"## {heading}", head, markdown_table(header, rows)])


def row(name: str, runs: list[dict], methods: dict[str, list[dict]]) -> list[str]:
    dense, mine = _bytes(methods.get(DENSE)), _bytes(runs)
    mark = "" if runs[0]["sent_bytes_per_step"] is not None else "p"
    unequal = "" if all(run["replicas_equal"] for run in runs) else " **replicas differ**"
    return [
        f"`{name}`, {len(runs)} seeds{unequal}",
        megabytes(mine) + mark,
        f"{dense / mine:.1f}" if dense and mine else "-",
        f"{statistics.mean(_values(runs, 'error')):.3f}",
        _mean_and_std(_values(runs, "training_loss")),
        _mean_and_std(_values(runs, "validation_loss")),
        _accuracy(runs),
        _against(runs, methods.get(DENSE)),
        _against(runs, methods.get(POWER)),
        *_at_equal_time(runs, methods.get(POWER)),
    ]


def _at_equal_time(runs: list[dict], baseline: list[dict] | None) -> list[str]:
    timed = [run for run in runs if run.get("equal_time_validation_loss") is not None]
    if not timed:
        return ["-"] * 3
    steps = max(timed, key=lambda run: run["started"])["equal_time_steps"]
    timed = [run for run in timed if run["equal_time_steps"] == steps]  # those of another number are left out
    loss = _mean_and_std(_values(timed, "equal_time_validation_loss"))
    # At equal time PowerSGD makes all its steps, so against itself there is nothing to compare.
    against = "-" if runs is baseline else _against(timed, baseline, "equal_time_validation_loss")
    return [str(steps), loss, against]


def _accuracy(runs: list[dict]) -> str:
    shares = [run["validation_accuracy"] for run in runs if run.get("validation_accuracy") is not None]
    return f"{100 * statistics.mean(shares):.1f} %" if len(shares) == len(runs) else "-"


def _against(runs: list[dict], baseline: list[dict] | None, field: str = "validation_loss") -> str:
    if baseline is None or baseline is runs:
        return "-"
    seeds = {run["seed"] for run in runs} & {run["seed"] for run in baseline}
    if len(seeds) < FEWEST_SEEDS:
        return "too few seeds"
    paired = [[run for run in side if run["seed"] in seeds] for side in (runs, baseline)]
    worse_by, word = verdict(*paired, field)
    return f"{worse_by:+.3f}, {word}"


def _values(runs: list[dict], field: str) -> list[float]:
    return [run[field] for run in runs]


def _bytes(runs: list[dict] | None) -> float | None:
    if not runs:
        return None
    interface = _values(runs, "sent_bytes_per_step")
    return statistics.mean(_values(runs, "payload_bytes") if None in interface else interface)


def _mean_and_std(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"
