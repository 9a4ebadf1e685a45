# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `auto.py`: one process a rank. Auto decides; then it is compared with what else is allowed."""

import statistics

import torch.distributed as dist
from models import TASKS
from speed_worker import SLOW_DISCARD, SLOW_STEP_S, SLOW_TIMED, timed_steps
from trainer import Trainer, emit, mean_over_ranks, start_worker

WARM_UP_STEPS = 4  # of rivals: dense steps, DDP's bucket rebuild
MOST_STEPS = 300  # until auto must have decided


def let_auto_decide(task, method: str) -> Trainer:
    trainer = Trainer(task, method)
    seconds = []
    while not trainer.wrapped.state.decision()["decided"]:
        if len(seconds) == MOST_STEPS:
            raise RuntimeError(f"{method} has not decided after {MOST_STEPS} steps")
        seconds.append(trainer.step()[1])
    steps_ms = [round(1e3 * x, 1) for x in mean_over_ranks(seconds)]
    emit("decided", decision=without_plans(trainer.wrapped.state.decision()), measuring_steps_ms=steps_ms)
    return trainer


def without_plans(decision: dict) -> dict:
    """A plan's text is long, and its label says enough."""
    for candidate in decision["candidates"]:
        if candidate["what"].startswith("{"):
            candidate["what"] = candidate["label"]
    return decision


def rotate(trainers: dict, rounds: int, config: dict, label: str) -> dict[str, float]:
    """Blocks of each in rotation; the median over rounds of each one's median step, in ms."""
    blocks = {name: [] for name in trainers}
    for number in range(rounds):
        names = list(trainers)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            trainer, counts = trainers[name]
            dist.barrier()
            block = timed_steps(trainer, *counts)
            blocks[name].append(block["step_ms"])
            emit("block", set=label, method=name, round=number, step_ms=block["step_ms"], steps_ms=block["steps_ms"])
    return {name: statistics.median(values) for name, values in blocks.items()}


def with_counts(trainer: Trainer, config: dict) -> tuple[Trainer, tuple[int, int]]:
    seconds = max(mean_over_ranks([trainer.step()[1]])[0] for _ in range(2))
    slow = seconds > SLOW_STEP_S
    return trainer, (SLOW_DISCARD, SLOW_TIMED // 2) if slow else (config["discard"], config["timed"])


def main() -> None:
    config = start_worker()
    task = TASKS[config["model"]]()
    auto = let_auto_decide(task, config["auto"])
    rivals = {}
    for name in config["rivals"]:
        emit("preparing", method=name)
        trainer = Trainer(task, name)
        for _ in range(WARM_UP_STEPS - 2):
            trainer.step()
        rivals[name] = with_counts(trainer, config)
    first = rotate(rivals, config["choosing_rounds"], config, "choosing")
    best = min(first, key=first.get)  # equal on all ranks: times are means over them
    emit("rival", method=best, first_ms=first)
    pair = {config["auto"]: with_counts(auto, config), best: rivals[best]}
    second = rotate(pair, config["rounds"], config, "comparing")
    emit(
        "result",
        times_ms=second,
        decision=without_plans(auto.wrapped.state.decision()),
        error=auto.measure_error(),
        payload_bytes=auto.wrapped.payload_bytes(),
        replicas_equal=auto.replicas_equal(),
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
