# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Makes docs/results/second_order.md and its pictures from the raw records of `second_order.py`."""

import itertools
import re
import statistics
from datetime import datetime
from pathlib import Path

from tables import markdown_table, times

LEGEND = """\
K-FAC: cortado.KFAC; it averages gradients itself, those of preconditioned layers only to the rank that owns the layer,
and gathers what the owners computed in one message a rank (`kfac + broadcasts`: a broadcast a layer). The strategy
stands in the heading, the same in all rows. Losses: mean and standard deviation over the seeds; a seed fixes weights
and batches for all methods. Training: mean of the last 10 steps; validation: on held-out data. Against kfac: mean
difference of the validation loss to uncompressed K-FAC with the same seeds (negative is better), and how many pooled
standard deviations that is: the root of the mean of both variances. Within seed noise is what is at most two of these
worse, and at most 2 % of the fall of K-FAC's own validation loss from the first step to the last. ms a step: mean over
steps and seeds, those with new factors and inverses included; where of some seeds only losses were recorded, beside
other work, over the others, whose number stands there; - where of all. Faster than kfac: than kfac in the same run of
the benchmark, which is not always the one in the table; *: there was none, so than that of the run nearest in time.

Bytes: kB of all ranks together in a message of each kind, mean over messages ("last": of the last one only, in older
records), and dense over payload, at the error beside it (relative L2 of what a rank sends, feedback included; mean
over messages and ranks). What a rank keeps for itself is in neither where a message is compressed. Gradients are the
preconditioned ones; reduced gradients are averaged by K-FAC itself. Stages: ms a step, mean over ranks; the exchange
(encode, gather, decode of preconditioned gradients) on the rank that waits least for the others, and its share of the
step. In newer rows the exchange is its span: from when the last rank begins it until the last has ended it, mean over
steps. Where ranks end it at different times, those that are done wait for the others in what follows, and only the
span has that: of two methods with all else equal the steps differ by as much as the spans. There forward and backward
stand beside it, with averaging of gradients where Cortado's codec does it."""
EXCHANGE_LEGEND = """\
Encode, all-gather and decode of preconditioned gradients, nothing else: the slowest rank's time, median of repetitions
over the tensors of eight successive steps in turn. Broadcasts: one for each tensor, all started at once, as
kfac-pytorch sends them. `none` is our own aggregated all-gather, which the others are compared with, that of the same
run. Second gathers: the share of steps in which a payload outgrew the room that the step before had left, so that its
rest came after. After steps: of training, whose gradients are exchanged. Ratio, error and second
gathers are of the first rate of the row."""
SETTINGS = (
    "strategy",
    "grad_worker_fraction",
    "compute_method",
    "workers",
    "steps",
    "factor_update_steps",
    "inv_update_steps",
    "damping",
    "skip_layers",
    "gradients",
    "timed",
)
KINDS = ("gradients", "factors", "inverses", "reduced_gradients")

_CURVES_IN_A_ROW = 7


def training_key(record: dict) -> tuple:
    """What tells training runs apart, besides method and seed."""
    values = [record[name] for name in ("task_name", "rate", *SETTINGS)]
    return tuple(" ".join(value) if isinstance(value, list) else value for value in values)


def write_report(records: list[dict], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "second_order.md"
    parts = ["# Second order: K-FAC and its exchange"]
    reading = folder / "second_order_reading.md"
    if reading.exists():
        parts.append(reading.read_text().strip())
    parts.append(LEGEND)
    pictures: set[Path] = set()
    baselines = [record for record in records if record["kind"] == "training" and record["method"] == "kfac"]
    for group in _training_groups(records):
        parts += _training_section(group, baselines, folder, pictures)
    exchanges = [record for record in records if record["kind"] == "exchange"]
    if exchanges:
        parts += ["## The exchange alone", EXCHANGE_LEGEND, *_exchange_sections(exchanges)]
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


# ---- training ----------------------------------------------------------------------------------------------------


def _training_groups(records: list[dict]) -> list[dict]:
    """[{method: [record of each seed]}], by settings; a later record replaces an equal earlier one."""
    groups: dict = {}
    for record in records:
        if record["kind"] == "training":
            group = groups.setdefault(training_key(record), {})
            group.setdefault(record["method"], {})[record["seed"]] = record
    return [
        {method: list(by_seed.values()) for method, by_seed in groups[key].items()}
        for key in sorted(groups, key=lambda key: tuple(map(str, key)))
    ]


def _training_section(group: dict, baselines: list[dict], folder: Path, pictures: set[Path]) -> list[str]:
    """baselines: all runs of kfac, those of other settings and those that were measured anew as well."""
    sample = next(iter(group.values()))[0]
    baselines = [run for run in baselines if training_key(run) == training_key(sample)]
    machine = ", ".join(f"{k} {v}" for k, v in sample["machine"].items())
    heading = f"## {sample['task_name']}, {sample['strategy']}, {sample['rate']}: {sample['steps']} steps"
    heading += f", {sample['workers']} worker{'s' * (sample['workers'] > 1)}"
    heading += "" if sample["timed"] else ", losses only"
    settings = [
        f"factors every {sample['factor_update_steps']} steps, inverses every {sample['inv_update_steps']}",
        f"{sample['compute_method']}, damping {sample['damping']:g}",
    ]
    if sample["strategy"] == "hybrid-opt":
        settings.append(f"grad_worker_fraction {sample['grad_worker_fraction']:g}")
    if sample["skip_layers"]:
        settings.append(f"without {' '.join(sample['skip_layers'])}")
    if sample["gradients"]:
        settings.append(f"gradients averaged as `{sample['gradients']}` in all rows")
    head = f"{sample['task']}; {', '.join(settings)}. {_when(group)}; {machine}; links: {sample['links']}"
    baseline = group.get("kfac")
    header = ["method", "training loss", "validation loss", "accuracy", "against kfac", "ms a step", "faster than kfac"]
    with_kfac = {method: runs for method, runs in group.items() if "kfac" in runs[0]}
    picture = _draw(sample, group, folder, pictures)
    return [
        heading,
        head,
        markdown_table(header, [_training_row(method, runs, baseline, baselines) for method, runs in group.items()]),
        _bytes_table(with_kfac),
        _stage_table(with_kfac) if sample["timed"] else "",
        _auto_table(with_kfac),
        f"![training loss]({picture.relative_to(folder)})" if picture else "",
    ]


def _when(group: dict) -> str:
    """Rows may be of several days."""
    runs = sorted((run for runs in group.values() for run in runs), key=lambda run: run["started"])
    first, last = ([run["started"], run["commit"]] for run in (runs[0], runs[-1]))
    return f"{first[0]}, commit {first[1]}" + (f", to {last[0]}, commit {last[1]}" if last != first else "")


def _name(method: str) -> str:
    """As a cell: a bar would end it."""
    return f"`{method}`".replace("|", "\\|")


def _mean(values) -> float:
    return statistics.mean(list(values))


def _timed(runs: list[dict]) -> list[dict]:
    """Those of which more was recorded than losses."""
    return [run for run in runs if run["step_ms"]]


def _mean_step_ms(runs: list[dict]) -> float | None:
    return _mean(_mean(run["step_ms"]) for run in _timed(runs)) if _timed(runs) else None


def _beside(runs: list[dict], baselines: list[dict]) -> tuple[list[dict], bool]:
    """The baselines of the same runs of the benchmark, or else of the one nearest in time; whether they are of the
    same."""
    if not runs or not baselines:
        return [], False
    started = {run["started"] for run in runs}
    same = [run for run in baselines if run["started"] in started]
    if same:
        return same, True

    def apart(other: dict) -> float:
        times = [datetime.fromisoformat(run["started"]) for run in (runs[0], other)]
        return abs((times[1] - times[0]).total_seconds())

    nearest = min(baselines, key=apart)["started"]
    return [run for run in baselines if run["started"] == nearest], False


def _training_row(method: str, runs: list[dict], baseline: list[dict] | None, baselines: list[dict]) -> list[str]:
    unequal = "" if all(run["replicas_equal"] for run in runs) else " **replicas differ**"
    step_ms = _mean_step_ms(runs)
    beside, is_same_run = _beside(_timed(runs), _timed(baselines))
    kfac_ms = _mean_step_ms(beside)
    accuracy = "-"
    if "validation_accuracy" in runs[0]:
        accuracy = f"{_mean_and_std([100 * run['validation_accuracy'] for run in runs], digits=1)} %"
    seeds = f", {len(runs)} seeds" if len(runs) > 1 else ", one seed"
    timed = len(_timed(runs))
    of_seeds = f" ({timed} of {len(runs)})" if 0 < timed < len(runs) else ""
    return [
        f"{_name(method)}{seeds}{unequal}",
        _mean_and_std([run["training_loss"] for run in runs]),
        _mean_and_std([run["validation_loss"] for run in runs if "validation_loss" in run]),
        accuracy,
        _against(runs, baseline),
        "-" if step_ms is None else f"{step_ms:.1f}{of_seeds}",
        times(kfac_ms / step_ms) + " *" * (not is_same_run) if kfac_ms and step_ms else "-",
    ]


def _payload_bytes(kfac: dict, kind: str) -> float:
    """Of a message, mean over all; older records have that of the last."""
    mean_bytes = kfac.get("mean_payload_bytes")
    return mean_bytes[kind] if mean_bytes else kfac["bytes"][kind][0]


def _bytes_table(methods: dict) -> str:
    """A column for each kind of message that somebody sent."""
    kinds = [k for k in KINDS if any(run["kfac"]["bytes"][k][1] for runs in methods.values() for run in runs)]
    if not kinds:
        return ""
    rows = []
    for method, runs in methods.items():
        cells = [_name(method)]
        for kind in kinds:
            payload = _mean(_payload_bytes(run["kfac"], kind) for run in runs)
            dense = _mean(run["kfac"]["bytes"][kind][1] for run in runs)
            error = _mean(run["kfac"]["error"][kind] for run in runs)
            last = "" if all("mean_payload_bytes" in run["kfac"] for run in runs) or dense == payload else ", last"
            cells += [f"{payload / 1e3:.1f}", f"{dense / payload:.1f} at {error:.3f}{last}"] if payload else ["-", "-"]
        rows.append(cells)
    header = ["bytes"]
    for kind in kinds:
        header += [f"{kind.replace('_', ' ')}, kB", "ratio at error"]
    return markdown_table(header, rows)


def _stage_table(methods: dict) -> str:
    methods = {method: _timed(runs) for method, runs in methods.items() if _timed(runs)}
    if not methods:
        return ""
    stages = list(next(iter(methods.values()))[0]["kfac"]["stage_ms"])
    has_spans = all(run["kfac"].get("exchange_span_ms") for runs in methods.values() for run in runs)
    rows = []
    for method, runs in methods.items():
        exchange_ms = _mean(run["kfac"]["exchange_span_ms" if has_spans else "exchange_ms"] for run in runs)
        by_stage = [_mean(run["kfac"]["stage_ms"][stage] for run in runs) for stage in stages]
        if has_spans:
            by_stage.insert(0, _mean(run["backward_ms"] for run in runs))
        share = 100 * exchange_ms / _mean_step_ms(runs)
        rows.append([_name(method), *(f"{ms:.2f}" for ms in by_stage), f"{exchange_ms:.2f}", f"{share:.0f} %"])
    header = ["ms a step", *["forward, backward"] * has_spans, *(stage.replace("_", " ") for stage in stages)]
    return markdown_table([*header, "span of exchange" if has_spans else "exchange", "share"], rows)


def _auto_table(methods: dict) -> str:
    """What compression="auto" decided of each kind of message, as rank 0 of each seed reports it."""
    times = [f"{which}{plain}_ns" for which in ("predicted", "measured") for plain in ("_uncompressed", "")]
    rows = []
    for method, runs in methods.items():
        for run in _timed(runs):
            for message, choice in run["kfac"].get("auto", {}).items():
                in_ms = [f"{choice[time] / 1e6:.2f}" if choice[time] else "-" for time in times]
                aggregate = choice.get("aggregate") or "all"
                row = [_name(method), run["seed"], message, _name(choice["codec"]), aggregate, *in_ms]
                rows.append([str(cell) for cell in row])
    header = ["what auto chose", "seed", "message", "codec", "layers together"]
    header += [f"{ms}, {which}" for ms in ("predicted ms", "measured ms") for which in ("uncompressed", "compressed")]
    return markdown_table(header, rows) if rows else ""


def _against(runs: list[dict], baseline: list[dict] | None) -> str:
    if baseline is None or baseline is runs or "validation_loss" not in runs[0]:
        return "-"
    seeds = {run["seed"] for run in runs} & {
        run["seed"] for run in baseline
    }  # those of a seed share weights and batches
    own, other = ([run["validation_loss"] for run in side if run["seed"] in seeds] for side in (runs, baseline))
    if not seeds:
        return "-"
    worse_by = _mean(own) - _mean(other)
    if len(own) < 2 or len(other) < 2:
        return f"{worse_by:+.4f}"
    pooled = ((statistics.variance(own) + statistics.variance(other)) / 2) ** 0.5
    return f"{worse_by:+.4f} ({worse_by / pooled:+.1f} std)" if pooled else f"{worse_by:+.4f}"


def _mean_and_std(values: list[float], digits: int = 4) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{_mean(values):.{digits}f}{spread}"


def _draw(sample: dict, group: dict, folder: Path, pictures: set[Path]) -> Path | None:
    """Smoothed training loss by step and, where steps were timed, by wall time; mean over seeds. None without
    matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    rows = _rows_of_curves(list(group))
    panels = 2 if sample["timed"] else 1
    size = (5.5 * panels, 3.6 * len(rows))
    figure, axes = pyplot.subplots(len(rows), panels, figsize=size, sharey=True, sharex="col", squeeze=False)
    colours = pyplot.get_cmap("tab10").colors
    first_losses = []
    for row, methods in zip(axes, rows, strict=True):
        for number, method in enumerate(methods):
            runs = group[method]
            curve = _smooth([_mean(values) for values in zip(*(run["losses"] for run in runs), strict=True)])
            first_losses.append(curve[0])
            is_baseline = method == "kfac"
            colour = "black" if is_baseline else colours[number % len(colours)]
            style = {"label": method, "linewidth": 1.8 if is_baseline else 1.1, "color": colour}
            row[0].plot(range(1, len(curve) + 1), curve, **style)
            if sample["timed"]:
                step_ms = [_mean(values) for values in zip(*(run["step_ms"] for run in _timed(runs)), strict=True)]
                row[1].plot([ms / 1e3 for ms in itertools.accumulate(step_ms)], curve[: len(step_ms)], **style)
        row[0].set(ylabel="training loss (smoothed)", yscale="log")
        row[0].yaxis.set_major_formatter("{x:g}")
        row[0].yaxis.set_minor_formatter(ticker.LogFormatter(labelOnlyBase=False))
        row[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    axes[0][0].set_ylim(top=1.2 * max(first_losses))  # what diverges leaves the picture
    axes[-1][0].set_xlabel("step")
    if sample["timed"]:
        axes[-1][1].set(xlabel=f"seconds, {sample['rate']}", xscale="log")
    picture = _picture_path(sample, folder, pictures)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100, bbox_inches="tight")
    pyplot.close(figure)
    return picture


def _rows_of_curves(methods: list[str]) -> list[list[str]]:
    """Few enough in a row to be told apart; "kfac", which the others are compared with, in each."""
    others = [method for method in methods if method != "kfac"]
    shared = ["kfac"] if "kfac" in methods else []
    count = max(1, -(-len(others) // _CURVES_IN_A_ROW))
    return [shared + others[len(others) * i // count : len(others) * (i + 1) // count] for i in range(count)]


def _smooth(values: list[float]) -> list[float]:
    level, smooth = values[0], []
    for value in values:
        level = 0.9 * level + 0.1 * value
        smooth.append(level)
    return smooth


def _picture_path(sample: dict, folder: Path, pictures: set[Path]) -> Path:
    """One file a group: a number tells apart what differs in other settings than the name says."""
    parts = [sample["task_name"], sample["strategy"], sample["rate"], sample["gradients"]]
    stem = re.sub(r"[^a-z0-9-]+", "_", "_".join(part for part in parts if part).lower()).strip("_")
    for number in itertools.count(1):
        path = folder / "second_order" / (f"{stem}.png" if number == 1 else f"{stem}_{number}.png")
        if path not in pictures:
            pictures.add(path)
            return path
    raise AssertionError("unreachable")


# ---- the exchange alone ------------------------------------------------------------------------------------------


def _exchange_sections(records: list[dict]) -> list[str]:
    groups: dict = {}
    for record in records:
        key = (record["task_name"], record["strategy"], record["workers"], " ".join(record["skip_layers"]))
        codec = record["codec"], record.get("exchange_steps", 20)
        groups.setdefault(key, {}).setdefault(record["rate"], {})[codec] = record
    uncompressed_ms = {_run_of(record): record["ms"] for record in records if record["codec"] == "none"}
    parts = []
    for (task, strategy, workers, without), rates in groups.items():
        sample = next(iter(next(iter(rates.values())).values()))
        machine = ", ".join(f"{k} {v}" for k, v in sample["machine"].items())
        shares = ", ".join(f"{share / 1e3:.0f}" for share in sample["shares"])
        header = ["codec", "ratio", "error", "second gathers", "after steps"]
        for rate in rates:
            header += [f"ms at {rate}", "faster than none"]
        codecs = list(dict.fromkeys(codec for by_codec in rates.values() for codec in by_codec))
        rows = [_exchange_row(codec, rates, uncompressed_ms) for codec in codecs]
        timed = [codec for codec in codecs if codec in _with_stages(rates)]
        stages = [[_name(codec[0]), str(codec[1]), *_exchange_stages(codec, rates)] for codec in timed]
        parts += [
            f"### {task}, {strategy}, {workers} workers",
            f"{sample['task']}{f', without {without}' if without else ''}: {sample['tensors']} tensors, dense "
            f"{sample['dense_bytes'] / 1e3:.0f} kB; kB a rank: {shares}. {sample['started']}, commit "
            f"{sample['commit']}; {machine}",
            markdown_table(header, rows),
            markdown_table(["encode / gather / decode, ms, rank 0", "after steps", *rates], stages),
        ]
    return parts


def _run_of(record: dict) -> tuple:
    return record["task_name"], record["strategy"], record["rate"], record["started"], record["commit"]


def _exchange_row(codec: tuple[str, int], rates: dict, uncompressed_ms: dict) -> list[str]:
    some = next(by_codec[codec] for by_codec in rates.values() if codec in by_codec)
    cells = [_name(codec[0]), f"{some['dense_bytes'] / some['payload_bytes']:.1f}", f"{some['error']:.3f}"]
    cells += [f"{100 * some['extra_gathers']:.0f} %", str(codec[1])]
    for by_codec in rates.values():
        if codec not in by_codec:
            cells += ["-", "-"]
            continue
        own_ms, plain_ms = by_codec[codec]["ms"], uncompressed_ms.get(_run_of(by_codec[codec]))
        cells += [f"{own_ms:.2f}", times(plain_ms / own_ms if plain_ms else None)]
    return cells


def _with_stages(rates: dict) -> set[tuple[str, int]]:
    return {codec for by_codec in rates.values() for codec, record in by_codec.items() if "stage_ms" in record}


def _exchange_stages(codec: tuple[str, int], rates: dict) -> list[str]:
    cells = []
    for by_codec in rates.values():
        stage_ms = by_codec.get(codec, {}).get("stage_ms")
        cells.append(" / ".join(f"{ms:.2f}" for ms in stage_ms.values()) if stage_ms else "-")
    return cells
