# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `speed.py`: one process a rank, all methods alive, measured in rotation."""

import statistics
import time

import torch.distributed as dist
from methods import TUNED, parse_method
from models import TASKS
from trainer import Trainer, emit, mean_over_ranks, sent_bytes, start_worker

TUNING_CAPS_MIB = (1, 4, 10, 25, 50)
SLOW_STEP_S = 2.0
SLOW_DISCARD, SLOW_TIMED = 1, 4  # steps a round where one takes longer than that


def timed_steps(trainer: Trainer, discard: int, timed: int) -> dict:
    """Median and all times of `timed` steps, after `discard` untimed ones."""
    for _ in range(discard):
        trainer.step()
    dist.barrier()
    sent_before = sent_bytes()
    own_ms = [1e3 * trainer.step()[1] for _ in range(timed)]
    sent_after = sent_bytes()
    mean_ms = mean_over_ranks(own_ms)
    sent = None if sent_before is None else round((sent_after - sent_before) / timed)
    return {
        # Of a synchronised step all ranks see the same time; without communication they do not.
        "step_ms": mean_over_ranks([statistics.median(own_ms)])[0],
        "steps_ms": [round(x, 3) for x in mean_ms],
        "sent_bytes_per_step": sent,
    }


def tune_bucket_cap(task, device: str) -> str:
    """The fastest of DDP's bucket sizes here, as a method name that all ranks agree on."""
    times_ms = {}
    for cap in TUNING_CAPS_MIB:
        trainer = Trainer(task, f"ddp @ {cap}", device=device)
        times_ms[cap] = timed_steps(trainer, discard=2, timed=2)["step_ms"]
    best = min(times_ms, key=times_ms.get)
    emit("tuned", times_ms=times_ms, best_mib=best)
    return f"ddp @ {best}"


def prepare(task, name: str, config: dict) -> tuple[Trainer, tuple[int, int]]:
    """A trainer past its dense steps and DDP's bucket rebuild; its untimed and timed steps a round."""
    emit("preparing", method=name)
    resolved = tune_bucket_cap(task, config["device"]) if name == TUNED else name
    trainer = Trainer(task, resolved, device=config["device"])
    for _ in range(config["warm_up_steps"]):
        _, seconds = trainer.step()
    slow = mean_over_ranks([seconds])[0] > SLOW_STEP_S  # all ranks agree
    plan = (SLOW_DISCARD, SLOW_TIMED) if slow else (config["discard"], config["timed"])
    cap = parse_method(resolved).bucket_cap_mib
    emit("prepared", method=name, bucket_cap_mib=cap, discard=plan[0], timed=plan[1])
    return trainer, plan


def main() -> None:
    config = start_worker()
    task = TASKS[config["model"]]()
    prepared = {name: prepare(task, name, config) for name in config["methods"]}
    for number in range(config["rounds"]):
        names = list(prepared)
        turn = number % len(names)  # each round starts at another method
        for name in names[turn:] + names[:turn]:
            trainer, plan = prepared[name]
            dist.barrier()
            block = timed_steps(trainer, *plan)
            emit("block", method=name, round=number, at_s=round(time.time()), **block)
    for trainer, _ in prepared.values():  # before a result: one of a net that is dead says nothing of gradients
        trainer.check_trains()
    for name, (trainer, _) in prepared.items():
        result = {
            "error": trainer.measure_error(),
            "payload_bytes": trainer.wrapped.payload_bytes(),
            "replicas_equal": trainer.replicas_equal() if trainer.wrapped.method.communicates else None,
            "report": trainer.wrapped.report_details(),
        }
        emit("result", method=name, **result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
