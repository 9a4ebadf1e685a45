# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `quality.py`: trains for fixed numbers of steps and measures the loss after each."""

import statistics

import torch.distributed as dist
from models import TASKS, Task
from trainer import Trainer, emit, mean_over_ranks, sent_bytes, start_worker

FINAL_STEPS = 10  # the final training loss is the mean of these


def run(task: Task, method: str, seed: int, steps: int, equal_time_steps: int | None) -> dict:
    """`equal_time_steps`: another number of steps after which to look at the validation loss."""
    trainer = Trainer(task, method, seed)
    module = trainer.wrapped.module
    initial = task.validation_loss(module)
    losses, step_s, validation_losses, accuracy = [], [], {}, None
    for step in range(1, max(steps, equal_time_steps or 0) + 1):
        if step == steps - FINAL_STEPS + 1:
            sent_before = sent_bytes()
        loss, seconds = trainer.step()
        losses.append(loss)
        step_s.append(seconds)
        if step in (steps, equal_time_steps):
            validation_losses[step] = task.validation_loss(module)
        if step == steps:
            sent_after = sent_bytes()
            accuracy = task.validation_accuracy(module) if task.validation_accuracy else None
        if step % 50 == 0:
            emit("progress", method=method, seed=seed, step=step, loss=loss)
    losses = mean_over_ranks(losses)
    sent = None if sent_before is None else round((sent_after - sent_before) / FINAL_STEPS)
    result = {
        "initial_validation_loss": initial,
        "validation_loss": validation_losses[steps],
        "validation_accuracy": accuracy,
        "training_loss": statistics.mean(losses[steps - FINAL_STEPS : steps]),
        "equal_time_steps": equal_time_steps,
        "equal_time_validation_loss": validation_losses.get(equal_time_steps),
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
        result = run(task, method, seed, config["steps"], config["equal_time_steps"].get(method))
        emit("result", task=task.describe, method=method, seed=seed, steps=config["steps"], **result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
