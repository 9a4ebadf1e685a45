# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The table and the picture of `demo.py`."""

import textwrap
from pathlib import Path

from methods import NO_COMMUNICATION, parse_method
from tables import megabytes, text_table, times

DENSE = ("ddp", "bf16", "fp16", NO_COMMUNICATION)
WINDOW = 5  # steps over which a training loss is averaged


def common_step(results: dict) -> int:
    """The last step that every compressed method reached; the dense ones may not have."""
    compressed = [r for name, r in results.items() if parse_method(name).codec not in DENSE]
    trained = [r for name, r in results.items() if name != NO_COMMUNICATION]
    return min(len(result["losses"]) for result in compressed or trained or results.values())


def loss_at(result: dict, step: int) -> float | None:
    """Training loss, mean over the workers and the last WINDOW steps up to `step`."""
    losses = result["losses"]
    if len(losses) < step:
        return None
    window = losses[max(0, step - WINDOW) : step]
    return sum(window) / len(window)


def result_table(record: dict) -> str:
    results = record["results"]
    step = common_step(results)
    seconds = f"{record['seconds_each']:g}s"
    header = ["method", "step ms", "vs DDP", "of limit", "MB/step", "ratio", "error", "steps"]
    header += [f"loss@{seconds}", f"@step {step}"]
    rows = [_row(name, results, step) for name in results]
    counted = [r["sent_bytes_per_step"] is not None for r in results.values()]
    sent = "sent by one worker's interface" if all(counted) else "payload handed to the collectives"
    first = max(1, step - WINDOW + 1)
    legend = (
        "step: median after the first 2. vs DDP: times faster. of limit: times the step without any "
        f"communication. MB/step: {sent}. ratio: DDP's bytes over these, at the error beside it (share "
        f"of gradient plus residual that a step held back, L2). loss@{seconds}: validation loss at equal "
        f"time. @step {step}: training loss, mean of steps {first} to {step}, - where not reached. "
        f"Links: {record['links']}."
    )
    unequal = [name for name, result in results.items() if result["replicas_equal"] is False]
    warnings = [f"THE REPLICAS DIFFER after {name}" for name in unequal]
    short = [name for name, result in results.items() if len(result["losses"]) <= 2]
    if short:
        warnings.append(f"ONLY DENSE STEPS were timed for {', '.join(short)}: raise SECONDS_EACH")
    return "\n".join([text_table(header, rows), "", textwrap.fill(legend, 98), *warnings])


def _row(name: str, results: dict, step: int) -> list[str]:
    result = results[name]
    cells = [name, f"{result['step_ms']:.0f}"]
    cells.append(times(_quotient(results.get("ddp", {}).get("step_ms"), result["step_ms"])))
    cells.append(times(_quotient(result["step_ms"], _limit_ms(results))))
    if name == NO_COMMUNICATION:  # each worker trains alone: no loss to compare
        return [*cells, "0", "-", "-", str(len(result["losses"])), "-", "-"]
    ratio = _quotient(_bytes(results.get("ddp", {})), _bytes(result))
    at_step = loss_at(result, step)
    return [
        *cells,
        megabytes(_bytes(result)),
        "-" if ratio is None else f"{ratio:.1f}",
        f"{result['error']:.3f}",
        str(len(result["losses"])),
        f"{result['validation_loss']:.3f}",
        "-" if at_step is None else f"{at_step:.3f}",
    ]


def _bytes(result: dict) -> float | None:
    sent = result.get("sent_bytes_per_step")
    return result.get("payload_bytes") if sent is None else sent


def _limit_ms(results: dict) -> float | None:
    return results.get(NO_COMMUNICATION, {}).get("step_ms")


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def write_picture(record: dict, path: Path) -> Path:
    """Training loss against wall time, one curve a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for number, (name, result) in enumerate(record["results"].items()):
        smooth = [loss_at(result, step) for step in range(1, len(result["losses"]) + 1)]
        alone = name == NO_COMMUNICATION
        label = f"{name}: {len(smooth)} steps" + (" (workers train alone)" if alone else "")
        style = {"linestyle": ":", "color": "grey"} if alone else {"color": f"C{number}"}
        few = {"marker": "o", "markersize": 3} if len(smooth) < 20 else {}
        axes.plot(result["seconds"], smooth, label=label, **style, **few)
    axes.set_xlabel("wall time, seconds")
    axes.set_ylabel(f"training loss, mean of {WINDOW} steps, nats a byte")
    axes.set_title(f"Byte-level GPT, 10.9 M parameters, {record['workers']} workers\n{record['links']}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return path
