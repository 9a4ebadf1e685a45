# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Sections of a check, run one after the other: what is done, what failed, what could not run and why. Kept on disk
after each, so that the next call goes on where this one ended."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import machine

LEAST_S = 10.0  # no section is begun with less


class NotRun(Exception):
    """Something is missing; the text says what."""

    state = "not run"


class InPart(NotRun):
    """What was run is good, and it was not all; the text says how much of it."""

    state = "in part"


class Failed(Exception):
    """It was tried; the text says what came of it."""


@dataclass(frozen=True)
class Section:
    name: str
    does: str
    limit_s: float
    run: Callable  # of a context; returns a line on what was found. Raises NotRun or Failed
    needs: tuple[str, ...] = ()
    # What others need, such as a build: runs when they do, done or not, and then finds most of its work done.
    prepares: bool = False
    on_device: bool = True


@dataclass(frozen=True)
class Outcome:
    state: str  # "done", "failed", "not run" or "in part"
    text: str
    seconds: float
    at: str
    facts: dict[str, str]


class Results:
    """The folder that results go to: `gpu/sections.json` says how each section went."""

    def __init__(self, out: Path):
        self.page = out / "gpu.md"
        self.raw = out / "gpu"
        self._path = self.raw / "sections.json"
        stored = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.outcomes = {name: Outcome(**outcome) for name, outcome in stored.items()}

    def forget(self) -> None:
        shutil.rmtree(self.raw, ignore_errors=True)
        self.outcomes = {}

    def keep(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        self.raw.mkdir(parents=True, exist_ok=True)
        stored = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        self._path.write_text(json.dumps(stored, indent=1) + "\n")

    def is_done(self, name: str, facts: dict[str, str]) -> bool:
        outcome = self.outcomes.get(name)
        return outcome is not None and outcome.state == "done" and same_subject(outcome.facts, facts)

    def describe(self, name: str) -> str:
        outcome = self.outcomes.get(name)
        return f"{outcome.state}, {outcome.at}" if outcome else "never run"


def same_subject(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether results of both can stand beside each other."""
    return all(one.get(key) == other.get(key) for key in ("device", "driver", "CUDA", "torch", "sources"))


class Runner:
    def __init__(self, sections: tuple[Section, ...], results: Results, facts: dict[str, str], limit_s: float):
        self._sections = {section.name: section for section in sections}
        self._results, self._facts = results, facts
        self._end = time.monotonic() + limit_s

    def run(self, asked: list[str] | None, context_of: Callable) -> dict[str, Outcome]:
        """Runs the sections `asked` for, or all that are not done; returns how these, and what they need, went."""
        names = asked or [name for name, section in self._sections.items() if not section.prepares]
        todo = [name for name in names if asked or not self._results.is_done(name, self._facts)]
        for name in sorted(set(names) - set(todo)):
            print(f"== {name}: done before, at {self._results.outcomes[name].at}")
        lacks_device = self._facts["device"] == machine.NO_DEVICE
        runnable = [name for name in todo if not (lacks_device and self._sections[name].on_device)]
        needed = {need for name in runnable for need in self._needs(name)}
        outcomes: dict[str, Outcome] = {}
        for name in self._sections:
            if name in todo or name in needed:
                print(f"== {name}", flush=True)
                outcomes[name] = self._run_one(name, outcomes, context_of, lacks_device)
                print(f"== {name}: {outcomes[name].state}, {outcomes[name].seconds:.0f} s: {outcomes[name].text}")
        return outcomes

    def _needs(self, name: str) -> set[str]:
        direct = self._sections[name].needs
        return set(direct).union(*(self._needs(need) for need in direct))

    def _run_one(self, name: str, before: dict[str, Outcome], context_of: Callable, lacks_device: bool) -> Outcome:
        section = self._sections[name]
        start = time.monotonic()
        try:
            if lacks_device and section.on_device:
                raise NotRun(self._facts["device"])
            for need in section.needs:
                if before[need].state != "done":
                    raise NotRun(f"it needs the section {need}: {before[need].state}")
            left_s = self._end - start
            if left_s < LEAST_S:
                raise NotRun("no time was left; the next call goes on here")
            context = context_of(section)
            context.deadline = start + min(section.limit_s, left_s)
            state, text = "done", section.run(context)
        except NotRun as reason:
            state, text = reason.state, str(reason)
        except Failed as reason:
            state, text = "failed", str(reason)
        except Exception as error:  # a mistake in one section stops no other
            state, text = "failed", f"{type(error).__name__}: {error}"
        outcome = Outcome(state, text, time.monotonic() - start, time.strftime("%Y-%m-%d %H:%M"), self._facts)
        if not lacks_device:
            self._results.keep(name, outcome)
        return outcome
