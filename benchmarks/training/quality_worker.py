# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `quality.py`: trains for a fixed number of steps and measures the final loss."""

import statistics

import torch.distributed as dist
from models import TASKS, Task
from trainer import Trainer, emit, mean_over_ranks, sent_bytes, start_worker

FINAL_STEPS = 10  # the final training loss is the mean of these


def run(task: Task, method: str, seed: int, steps: int) -> dict:
    trainer = Trainer(task, method, seed)
    module = trainer.wrapped.ddp.module
    initial = task.validation_loss(module)
    losses, step_s = [], []
    for step in range(1, steps + 1):
        if step == steps - FINAL_STEPS + 1:
            sent_before = sent_bytes()
        loss, seconds = trainer.step()
        losses.append(loss)
        step_s.append(seconds)
        if step % 50 == 0:
            emit("progress", method=method, seed=seed, step=step, loss=loss)
    sent_after = sent_bytes()
    losses = mean_over_ranks(losses)
    sent = None if sent_before is None else round((sent_after - sent_before) / FINAL_STEPS)
    result = {
        "initial_validation_loss": initial,
        "validation_loss": task.validation_loss(module),
        "training_loss": statistics.mean(losses[-FINAL_STEPS:]),
        "sent_bytes_per_step": sent,
        "step_ms": 1e3 * statistics.median(step_s),
        "replicas_equal": trainer.replicas_equal(),
        "losses": [round(x, 4) for x in losses],
    }
    # After the losses: this takes more steps.
    result["error"] = trainer.measure_error()
    result["payload_bytes"] = trainer.wrapped.payload_bytes()
    return result


def main() -> None:
    config = start_worker()
    task = TASKS[config["task"]]()
    for method, seed in config["runs"]:
        result = run(task, method, seed, config["steps"])
        emit("result", task=task.describe, method=method, seed=seed, steps=config["steps"], **result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
