# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/second_order.md and its picture from the raw records of `second_order.py`."""

import statistics
from pathlib import Path

from tables import markdown_table, times

LEGEND = """\
K-FAC: cortado.KFAC; it averages gradients itself, those of preconditioned layers only to the rank that owns the layer,
and gathers what the owners computed in one message a rank. The strategy stands in the heading, the same in all rows.
Losses: mean and standard deviation over the seeds; a seed fixes weights and batches for all methods. Training: mean of
the last 10 steps; validation: on held-out data. Ratio: bytes of preconditioned gradients of all owners, dense over
payload, reached at the error beside it (relative L2 of what an owner sends, feedback included; mean over steps and
owners). Against: mean difference of the validation loss to uncompressed K-FAC (negative is better), and how many pooled
standard deviations that is. Stages: ms a step, rank 0."""
EXCHANGE_LEGEND = """\
Encode, all-gather and decode of the preconditioned gradients of one step, nothing else: the slowest rank's time, median
of repetitions. Broadcasts: one for each tensor, all started at once, as kfac-pytorch sends them."""
KEY = ("task_name", "task", "strategy", "workers", "steps", "factor_update_steps", "inv_update_steps", "damping")
STAGES = ("factors", "reduce_factors", "inverses", "precondition", "reduce_gradients", "encode", "gather", "decode")


def write_report(records: list[dict], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "second_order.md"
    parts = ["# Second order: K-FAC and its exchange", LEGEND]
    for key, runs in sorted(_training_groups(records).items()):
        parts += _training_section(key, runs, folder)
    exchanges = [record for record in records if record["kind"] == "exchange"]
    if exchanges:
        parts += ["## The exchange alone", EXCHANGE_LEGEND, *_exchange_sections(exchanges)]
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _training_groups(records: list[dict]) -> dict:
    """{(task, ...): {method: {seed: record}}}; a later record replaces an equal earlier one."""
    groups: dict = {}
    for record in records:
        if record["kind"] == "training":
            names = (
                "task_name",
                "task",
                "strategy",
                "workers",
                "steps",
                "factor_update_steps",
                "inv_update_steps",
                "damping",
            )
            group = groups.setdefault(tuple(record[name] for name in names), {})
            group.setdefault(record["method"], {})[record["seed"]] = record
    return groups


def _training_section(key: tuple, group: dict, folder: Path) -> list[str]:
    name, task, strategy, workers, steps, factor_steps, inv_steps, damping = key
    methods = {method: list(by_seed.values()) for method, by_seed in group.items()}
    sample = next(iter(methods.values()))[0]
    machine = ", ".join(f"{k} {v}" for k, v in sample["machine"].items())
    heading = f"## {task.split(',')[0]}; {strategy}, {steps} steps, {workers} workers"
    head = (
        f"{task}; factors every {factor_steps} steps, inverses every {inv_steps}, damping {damping:g}. "
        f"{sample['started']}, commit {sample['commit']}; {machine}; links: {sample['links']}"
    )
    header = ["method", "training loss", "validation loss", "against kfac", "ratio", "error", "kB of gradients a step"]
    rows = [_training_row(method, runs, methods.get("kfac")) for method, runs in methods.items()]
    stage_rows = [_stage_row(method, runs) for method, runs in methods.items() if "kfac" in runs[0]]
    picture = _draw(name, methods, folder)
    return [
        heading,
        head,
        markdown_table(header, rows),
        markdown_table(["ms a step", *STAGES], stage_rows) if stage_rows else "",
        f"![training loss by step]({picture})" if picture else "",
    ]


def _training_row(method: str, runs: list[dict], baseline: list[dict] | None) -> list[str]:
    unequal = "" if all(run["replicas_equal"] for run in runs) else " **replicas differ**"
    ratio = error = kilobytes = "-"
    if "kfac" in runs[0]:
        payload, dense = (statistics.mean(run["kfac"]["bytes"]["gradients"][i] for run in runs) for i in (0, 1))
        ratio, kilobytes = f"{dense / payload:.1f}", f"{payload / 1e3:.1f}"
        error = f"{statistics.mean(run['kfac']['relative_error'] for run in runs):.3f}"
    return [
        f"`{method}`, {len(runs)} seeds{unequal}",
        _mean_and_std([run["training_loss"] for run in runs]),
        _mean_and_std([run["validation_loss"] for run in runs]),
        _against(runs, baseline),
        ratio,
        error,
        kilobytes,
    ]


def _stage_row(method: str, runs: list[dict]) -> list[str]:
    return [f"`{method}`", *(f"{statistics.mean(r['kfac']['stage_ms'][stage] for r in runs):.2f}" for stage in STAGES)]


def _against(runs: list[dict], baseline: list[dict] | None) -> str:
    if baseline is None or baseline is runs or len(runs) < 2 or len(baseline) < 2:
        return "-"
    own, other = ([run["validation_loss"] for run in side] for side in (runs, baseline))
    worse_by = statistics.mean(own) - statistics.mean(other)
    pooled = ((statistics.variance(own) + statistics.variance(other)) / 2) ** 0.5
    return f"{worse_by:+.4f} ({worse_by / pooled:+.1f} std)" if pooled else f"{worse_by:+.4f}"


def _exchange_sections(records: list[dict]) -> list[str]:
    groups: dict = {}
    for record in records:
        key = (record["task_name"], record["strategy"], record["workers"])
        groups.setdefault(key, {}).setdefault(record["rate"], {})[record["codec"]] = record
    parts = []
    for (task, strategy, workers), rates in groups.items():
        sample = next(iter(next(iter(rates.values())).values()))
        machine = ", ".join(f"{k} {v}" for k, v in sample["machine"].items())
        shares = ", ".join(f"{share / 1e3:.0f}" for share in sample["shares"])
        header = ["codec", "ratio", "error"]
        for rate in rates:
            header += [f"ms at {rate}", "faster than none"]
        codecs = list(dict.fromkeys(codec for by_codec in rates.values() for codec in by_codec))
        rows = [_exchange_row(codec, rates) for codec in codecs]
        parts += [
            f"### {task}, {strategy}, {workers} workers",
            f"Dense {sample['dense_bytes'] / 1e3:.0f} kB; kB a rank: {shares}. {sample['started']}, "
            f"commit {sample['commit']}; {machine}",
            markdown_table(header, rows),
        ]
    return parts


def _exchange_row(codec: str, rates: dict) -> list[str]:
    some = next(by_codec[codec] for by_codec in rates.values() if codec in by_codec)
    cells = [f"`{codec}`", f"{some['dense_bytes'] / some['payload_bytes']:.1f}", f"{some['error']:.3f}"]
    for by_codec in rates.values():
        if codec not in by_codec:
            cells += ["-", "-"]
            continue
        plain = by_codec.get("none")
        cells += [f"{by_codec[codec]['ms']:.2f}", times(plain["ms"] / by_codec[codec]["ms"] if plain else None)]
    return cells


def _mean_and_std(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _draw(name: str, methods: dict, folder: Path) -> str | None:
    """Smoothed training loss by step, mean over seeds; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for method, runs in methods.items():
        mean = [statistics.mean(values) for values in zip(*(run["losses"] for run in runs), strict=True)]
        smooth, level = [], mean[0]
        for value in mean:
            level = 0.9 * level + 0.1 * value
            smooth.append(level)
        axes.plot(range(1, len(smooth) + 1), smooth, label=method, linewidth=1)
    axes.set(xlabel="step", ylabel="training loss (smoothed)", yscale="log")
    axes.legend(fontsize=7)
    picture = f"second_order_{name}.svg"
    matplotlib.rcParams["svg.hashsalt"] = "cortado"
    figure.savefig(folder / picture, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    return picture
