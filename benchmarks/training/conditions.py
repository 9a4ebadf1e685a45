# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What a measurement depends on, for the head of a table."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def source_commit() -> str:
    """Of this checkout, with a "+" where files differ from it (not results: a sweep adds to them); "unknown"
    outside of git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)docs/results"]
        changes = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


def describe_machine() -> dict[str, str]:
    return {
        "cpu": f"{cpu_name()}, {os.cpu_count()} cores",
        "kernel": f"{platform.system()} {platform.release()}",
        "torch": version("torch"),
        "cortado": version("cortado"),
        "python": platform.python_version(),
        "load at start": f"{os.getloadavg()[0]:.1f}",
    }
