# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `auto.py`: one process a rank. Auto decides; then it is compared with what else is allowed.

How long a step takes with some codecs depends on the gradients, and these on how far training has come. So rivals go
on from the weights with which auto decided, and the one that is chosen goes on from auto's again when both are
compared."""

import statistics

import torch.distributed as dist
from models import TASKS
from speed_worker import SLOW_STEP_S, timed_steps
from trainer import Trainer, emit, mean_over_ranks, start_worker

WARM_UP_STEPS, SLOW_WARM_UP_STEPS = 4, 2  # dense steps, DDP's bucket rebuild; the last one tells how long a step takes
MOST_STEPS = 1000  # until auto must have decided
FEWEST_TIMED = 2  # steps of a block, however slow
FAR, CLOSE = 1.5, 1.15  # a rival this many times slower than the best after one round, or more, is not measured again


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


def what_auto_does(trainer: Trainer) -> dict | None:
    """Whether auto runs what it decided, which setting that is and since which step; None of other methods."""
    decision = getattr(trainer.wrapped.state, "decision", lambda: None)()
    if decision is None:
        return None
    label = decision["candidates"][decision["chosen"]]["label"] if decision["candidates"] else None
    return {"decided": decision["decided"], "chosen": label, "step": decision["step"]}


def without_plans(decision: dict) -> dict:
    """A plan's text is long, and its label says enough."""
    for candidate in decision["candidates"]:
        if candidate["what"].startswith("{"):
            candidate["what"] = candidate["label"]
    return decision


class Runner:
    """A trainer with the seconds that one of its steps takes, the same on all ranks."""

    def __init__(self, name: str, trainer: Trainer, start: Trainer | None = None):
        self.name = name
        self.trainer = trainer
        if start is not None:
            trainer.go_on_from(start)
        for number in range(WARM_UP_STEPS):
            self.step_s = mean_over_ranks([trainer.step()[1]])[0]
            if number + 1 >= SLOW_WARM_UP_STEPS and self.step_s > SLOW_STEP_S:
                break
        self.blocks_ms = []

    def measure(self, label: str, number: int, seconds: float, most_timed: int) -> None:
        """One block of as many steps as fit into so many seconds, one untimed step among them."""
        timed = max(FEWEST_TIMED, min(most_timed, int(seconds / self.step_s) - 1))
        dist.barrier()
        block = timed_steps(self.trainer, 1, timed)
        self.step_s = block["step_ms"] / 1e3  # of warm-up steps some are dense, whatever the method
        self.blocks_ms.append(block["step_ms"])
        now = what_auto_does(self.trainer)
        own = {} if now is None else {"auto": now}  # it may have gone back to trials within the block
        times = {"step_ms": block["step_ms"], "steps_ms": block["steps_ms"]}
        emit("block", set=label, method=self.name, round=number, **times, **own)

    def step_ms(self) -> float:
        return statistics.median(self.blocks_ms)


def turned(runners: list, number: int) -> list:
    """Each round begins with another one."""
    turn = number % len(runners)
    return runners[turn:] + runners[:turn]


def choose_rival(rivals: list[Runner], config: dict) -> Runner:
    """The fastest. Those that are behind in all of their rounds stay out of the others, for good: the few blocks of a
    rival may have been in a fast spell. After one round only those far behind: a slow spell shall not end the best.
    Each round has the same time, whoever is left in it."""
    round_s = config["seconds"] / 2 / config["choosing_rounds"]
    measured = list(rivals)
    for number in range(config["choosing_rounds"]):
        for rival in turned(measured, number):
            rival.measure("choosing", number, round_s / len(measured), config["timed"])
        best_ms = min(rival.step_ms() for rival in measured)
        limit = CLOSE if number else FAR
        measured = [rival for rival in measured if min(rival.blocks_ms) <= limit * best_ms]
    return min(measured, key=lambda rival: rival.step_ms())


def passed_over(chosen: str, rivals: list[Runner], rival: Runner) -> str | None:
    """The rival that is auto's own setting, where another one was chosen."""
    own = "ddp" if chosen == "dense" else chosen
    return own if own != rival.name and own in [each.name for each in rivals] else None


def main() -> None:
    config = start_worker()
    task = TASKS[config["model"]]()
    trainer = let_auto_decide(task, config["auto"])
    if config["rivals"]:
        compare(task, trainer, config)
    dist.barrier()
    dist.destroy_process_group()


def compare(task, trainer: Trainer, config: dict) -> None:
    """Auto, which has decided, and its best rival."""
    rivals = []
    for name in config["rivals"]:
        emit("preparing", method=name)
        rivals.append(Runner(name, Trainer(task, name), trainer))
    rival = choose_rival(rivals, config)
    own = passed_over(what_auto_does(trainer)["chosen"], rivals, rival)
    first_ms = {each.name: each.step_ms() for each in rivals}
    emit("rival", method=rival.name, first_ms=first_ms, passed_over=own)
    auto = Runner(config["auto"], trainer)
    rival.trainer.go_on_from(trainer)
    rival.blocks_ms = []
    for number in range(config["rounds"]):
        for runner in turned([auto, rival], number):
            runner.measure("comparing", number, config["seconds"] / 2 / (2 * config["rounds"]), config["timed"])
    for runner in (auto, rival):
        runner.trainer.check_trains()
    emit(
        "result",
        times_ms={runner.name: runner.step_ms() for runner in (auto, rival)},
        decision=without_plans(trainer.wrapped.state.decision()),
        error=trainer.measure_error(),
        payload_bytes=trainer.wrapped.payload_bytes(),
        replicas_equal=trainer.replicas_equal(),
    )


if __name__ == "__main__":
    main()
