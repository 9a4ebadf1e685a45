# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Runs one script on every rank of some links and ends all of them as soon as one fails."""

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from links import Links

POLL_S = 0.05
GRACE_S = 3.0  # how long the other ranks may take to fail by themselves, for their own messages
TAIL_LINES = 8


class WorkerFailed(RuntimeError):
    """A rank failed or fell silent; the text holds the end of what the failed ranks printed."""


def run_ranks(links: Links, argv: list[str]) -> int:
    """Runs a command on every rank with inherited output; returns the first exit status not 0."""
    processes = [links.popen(rank, argv) for rank in range(links.ranks)]
    try:
        failed = _wait_for_failure(processes)
        return 0 if failed is None else _exit_status(processes[failed])
    finally:
        _end(processes)


def run_workers(
    links: Links, script: Path, config: dict, on_event: Callable[[dict], None], idle_s: float = 300
) -> None:
    """Runs a worker script on every rank; `on_event` gets each JSON line that rank 0 prints.

    Raises WorkerFailed when a rank ends with an error or nothing was heard for `idle_s` seconds.
    """
    argv = [sys.executable, "-u", str(script), json.dumps(config)]
    # One thread a worker; idle OpenMP threads must not spin on a core that another rank needs.
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="cortado-workers-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(links.ranks)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as stderr:
                    stdout = subprocess.PIPE if rank == 0 else stderr
                    options = {"stdout": stdout, "stderr": stderr, "stdin": subprocess.DEVNULL}
                    processes.append(links.popen(rank, argv, environment, **options))
            failed = _follow(processes, on_event, idle_s)
            if failed is not None:
                _wait_all(processes, GRACE_S)
                raise WorkerFailed(_describe_failure(processes, failed, logs))
        finally:
            _end(processes)


def _follow(processes, on_event, idle_s: float) -> int | None:
    """Passes on events until every rank has ended; returns the first rank that failed, if any."""
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: [lines.put(x.decode()) for x in processes[0].stdout])
    reader.start()
    heard = time.monotonic()
    failed = None
    while failed is None and (reader.is_alive() or not lines.empty()):
        try:
            _deliver(lines.get(timeout=POLL_S), on_event)
            heard = time.monotonic()
        except queue.Empty:
            if time.monotonic() - heard > idle_s:
                raise WorkerFailed(f"the workers said nothing for {idle_s:.0f} s") from None
        failed = _first_failed(processes)
    while not lines.empty():
        _deliver(lines.get(), on_event)
    return _wait_for_failure(processes) if failed is None else failed


def _deliver(line: str, on_event) -> None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        event = None
    if isinstance(event, dict):
        on_event(event)
    elif line.strip():
        print(f"rank 0: {line.rstrip()}", file=sys.stderr)


def _first_failed(processes) -> int | None:
    return next((i for i, process in enumerate(processes) if process.poll()), None)


def _wait_for_failure(processes) -> int | None:
    """Waits until one rank fails (its number) or all have ended well (None)."""
    while (failed := _first_failed(processes)) is None:
        if all(process.poll() == 0 for process in processes):
            return None
        time.sleep(POLL_S)
    return failed


def _wait_all(processes, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_S)


def _end(processes) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _exit_status(process) -> int:
    """As a shell gives it: 128 + the signal's number for a process that a signal ended."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _describe_failure(processes, first: int, logs: list[Path]) -> str:
    parts = []
    for rank in sorted(range(len(processes)), key=lambda rank: rank != first):
        code = processes[rank].poll()
        if not code:
            continue
        how = f"exit status {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        how += " (out of memory?)" if code == -signal.SIGKILL else ""
        tail = logs[rank].read_text(errors="replace").splitlines()[-TAIL_LINES:]
        parts.append("\n    ".join([f"rank {rank}: {how}", *tail]))
    return "a worker failed\n" + "\n".join(parts)
