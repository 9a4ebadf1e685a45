# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `demo.py`: trains by one method after the other, each for the same wall time."""

import statistics
import time

import torch.distributed as dist
from models import TASKS, Task, train_lm
from trainer import Trainer, emit, mean_over_ranks, sent_bytes, start_worker

START_STEP = 2  # dense steps at the start of every compressor, not counted in step times
PROGRESS_S = 1.0


def train_for(trainer: Trainer, seconds: float) -> dict:
    """Trains for a wall time on all ranks; returns the curve and the step times."""
    seconds_at, losses, step_ms, sent = [], [], [], [sent_bytes()]
    dist.barrier()
    start = told = time.perf_counter()
    while True:
        loss, step_s = trainer.step()
        sent.append(sent_bytes())
        step_ms.append(1e3 * step_s)
        elapsed_s = time.perf_counter() - start
        # One tiny all-reduce a step, outside its time: the mean loss, and one clock for all ranks.
        mean_loss, mean_elapsed_s = mean_over_ranks([loss, elapsed_s])
        seconds_at.append(mean_elapsed_s)
        losses.append(mean_loss)
        if time.perf_counter() - told > PROGRESS_S:
            told = time.perf_counter()
            emit("progress", steps=len(losses), elapsed_s=mean_elapsed_s, loss=mean_loss)
        if mean_elapsed_s + mean_elapsed_s / len(losses) / 2 >= seconds:
            break  # one more step would end further from the wall time asked for than this one
    counted_ms = step_ms[START_STEP:] or step_ms
    counted_bytes = None
    if sent[0] is not None:
        first = START_STEP if len(step_ms) > START_STEP else 0
        counted_bytes = round((sent[-1] - sent[first]) / (len(step_ms) - first))
    return {
        "seconds": [round(x, 3) for x in seconds_at],
        "losses": [round(x, 4) for x in losses],
        "step_ms": mean_over_ranks([statistics.median(counted_ms)])[0],
        "sent_bytes_per_step": counted_bytes,
    }


def run_method(task: Task, name: str, config: dict, validation) -> None:
    trainer = Trainer(task, name)
    if not trainer.replicas_equal():
        raise RuntimeError("the ranks start from different weights")
    emit("start", method=name)
    outcome = train_for(trainer, config["seconds_each"])
    rank, world = dist.get_rank(), dist.get_world_size()
    outcome["validation_loss"] = train_lm.validation_loss(trainer.wrapped.module, validation, rank, world)
    communicates = trainer.wrapped.method.communicates
    outcome["replicas_equal"] = trainer.replicas_equal() if communicates else None
    outcome["error"] = trainer.measure_error()
    outcome["payload_bytes"] = trainer.wrapped.payload_bytes()
    emit("result", method=name, **outcome)


def main() -> None:
    config = start_worker()
    task = TASKS["gpt"]()
    _, validation = train_lm.read_text()
    for name in config["methods"]:
        run_method(task, name, config, validation)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
