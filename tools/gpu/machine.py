# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What a measurement on a GPU depends on."""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

NO_DEVICE = "no CUDA device: nvidia-smi lists none"
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
# Of these the results are results; a change elsewhere repeats nothing.
SOURCES = (
    "CMakeLists.txt",
    "cmake",
    "include",
    "src",
    "python",
    "benchmarks/codec",
    "benchmarks/training",
    "tools/gpu",
)


def default_python(root: Path) -> str:
    own = root / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def find_tool(name: str) -> str | None:
    """On the PATH, or where CUDA and the driver put their programs."""
    folders = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/usr/local/nvidia/bin"]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def output_of(argv: list[str]) -> str:
    """Empty where the command can't be run or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def query_device() -> dict[str, str]:
    """The first device, as nvidia-smi has it; what it does not know is left out."""
    smi = find_tool("nvidia-smi")
    line = output_of([smi, f"--query-gpu={QUERY}", "--format=csv,noheader"]) if smi else ""
    return parse_device(line)


def parse_device(line: str) -> dict[str, str]:
    values = [value.strip() for value in line.partition("\n")[0].split(",")]
    if len(values) != len(QUERY.split(",")):
        return {"device": NO_DEVICE}
    name, driver, memory, sm, sm_most, mem, mem_most, power = values
    facts = {
        "device": f"{name}, {memory}",
        "driver": driver,
        "clocks": f"SM {sm} (at most {sm_most}), memory {mem} (at most {mem_most}) at the start, power limit {power}",
    }
    return facts


def digest_of_sources(root: Path) -> str:
    digest = hashlib.sha256()
    for part in SOURCES:
        files = [root / part] if (root / part).is_file() else sorted((root / part).rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".md":
                digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return match[1] if match else platform.machine()


def commit_of(root: Path) -> str:
    """Of the checkout; where that came without its history, of the pack that came with it."""
    commit = output_of(["git", "-C", str(root), "describe", "--always", "--dirty=+"])
    manifest = root / "build" / "gpu_pack" / "manifest.json"
    if not commit and manifest.exists():
        commit = json.loads(manifest.read_text())["commit"]
    return commit or "unknown"


def describe(root: Path, python: str) -> dict[str, str]:
    nvcc = find_tool("nvcc")
    release = re.search(r"release [\d.]+, V([\d.]+)", output_of([nvcc, "--version"])) if nvcc else None
    torch = output_of([python, "-c", "import torch; print(torch.__version__, 'for CUDA', torch.version.cuda)"])
    return {
        **query_device(),
        "CUDA": release[1] if release else "nvcc not found",
        "torch": torch or f"not found by {Path(python).name}",
        "host": f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "compiler": output_of(["c++", "--version"]).partition("\n")[0] or "c++ not found",
        "Python": output_of([python, "-c", "import platform; print(platform.python_version())"]) or "not found",
        "commit": commit_of(root),
        "sources": digest_of_sources(root),
    }
