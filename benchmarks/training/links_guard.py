# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Deletes the network namespaces of one owner as soon as that owner is gone.

`links.py` starts this file as a detached process that holds the read end of a pipe. The pipe closes
when the owner closes it or dies, by whatever signal, and then every namespace whose name begins
with the given prefix goes, together with the processes inside it (all of them are the owner's).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMESPACE_DIR = Path("/run/netns")


def list_namespaces(prefix: str) -> list[str]:
    """Names of the existing network namespaces that begin with `prefix`."""
    if not NAMESPACE_DIR.is_dir():
        return []
    return sorted(path.name for path in NAMESPACE_DIR.iterdir() if path.name.startswith(prefix))


def ip(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


def kill_inside(namespace: str) -> None:
    for pid in ip("netns", "pids", namespace).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def delete_namespaces(prefix: str, patience_s: float = 10.0) -> list[str]:
    """Kills what runs inside, deletes the namespaces, and returns the names that would not go."""
    if not prefix:
        raise ValueError("a prefix is needed: this deletes every namespace that begins with it")
    deadline = time.monotonic() + patience_s
    while names := list_namespaces(prefix):
        for name in names:
            kill_inside(name)
            ip("netns", "delete", name)
        if time.monotonic() > deadline:
            return list_namespaces(prefix)
        if list_namespaces(prefix):
            time.sleep(0.05)
    return []


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.buffer.read()  # blocks until the owner closes its end or dies
    return 1 if delete_namespaces(sys.argv[1]) else 0


if __name__ == "__main__":
    sys.exit(main())
