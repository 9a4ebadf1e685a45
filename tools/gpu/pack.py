# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What a machine that has CUDA and torch lacks to build and check Cortado: collected here into one folder, laid out
like /usr, and put before its own libraries there."""

import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import machine

FOLDER = Path("build") / "gpu_pack"
MOST_BYTES = 64 * 2**20  # that travel to a lent machine, the tracked files included
TRIPLET = sysconfig.get_config_var("MULTIARCH") or ""
UNUSABLE = "not used"
PREFIXES = (Path("/usr/local"), Path("/usr"))


@dataclass(frozen=True)
class Piece:
    """Files below a prefix, by pattern; the first pattern must be found."""

    name: str
    headers: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    cmake: tuple[str, ...] = ()  # package folders


PIECES = (
    Piece("Highway", ("hwy",), ("libhwy*.so*",), ("hwy",)),
    Piece("nlohmann-json", ("nlohmann",), (), ("nlohmann_json",)),
    Piece("GoogleTest", ("gtest", "gmock"), ("libgtest*.a", "libgmock*.a"), ("GTest",)),
    Piece("Google Benchmark", ("benchmark",), ("libbenchmark*",), ("benchmark",)),
    Piece("OpenBLAS", ("cblas.h", "openblas_config.h"), ("libopenblas.so*", "libgfortran.so.*", "libquadmath.so.*")),
    Piece("LAPACKE", ("lapacke*.h", "lapack.h")),
    # Only to link with: every machine has libz.so.1, and its programs may want a newer one than ours.
    Piece("zlib", ("zlib.h", "zconf.h"), ("libz.so",)),
)
PROGRAMS = ("ip", "tc", "setpriv")  # for shaped links
MODULES = ("nanobind",)


def describe(root: Path) -> str:
    """What the pack is, or why it is not used."""
    file = root / FOLDER / "manifest.json"
    if not file.exists():
        return "none"
    manifest = json.loads(file.read_text())
    here = (platform.machine(), platform.libc_ver())
    name, _, version = manifest["libc"].partition(" ")
    if here[0] != manifest["machine"] or here[1][0] != name or as_numbers(here[1][1]) < as_numbers(version):
        there = f"{manifest['machine']} with {manifest['libc']}"
        return f"{UNUSABLE}: made for {there}, here is {here[0]} with {' '.join(here[1])}"
    return f"made at {manifest['made']} from {manifest['commit']}"


def as_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def environment(root: Path) -> dict[str, str]:
    """The environment in which the pack is used, where there is one that can be."""
    folder = root / FOLDER
    variables = dict(os.environ)
    if describe(root).startswith(("none", UNUSABLE)):
        return variables

    def put(name: str, path: Path, *, first: bool) -> None:
        parts = [str(path), variables.get(name, "")]
        variables[name] = os.pathsep.join(part for part in (parts if first else reversed(parts)) if part)

    put("CMAKE_PREFIX_PATH", folder, first=True)
    put("CPLUS_INCLUDE_PATH", folder / "include", first=True)
    # The linker looks here for what OpenBLAS needs, and so do the programs.
    put("LD_LIBRARY_PATH", folder / "lib" / TRIPLET, first=True)
    put("PYTHONPATH", folder / "python", first=False)
    put("PATH", folder / "bin", first=False)
    return variables


def collect(root: Path, python: str) -> int:
    folder = root / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    missing, sizes = [], {}
    for piece in PIECES:
        before = size_of(folder)
        if not add_piece(piece, folder):
            missing.append(piece.name)
        sizes[piece.name] = size_of(folder) - before
    for name in PROGRAMS:
        before = size_of(folder)
        if not add_program(name, folder):
            missing.append(name)
        sizes[name] = size_of(folder) - before
    for name in MODULES:
        before = size_of(folder)
        if not add_module(name, python, folder):
            missing.append(name)
        sizes[name] = size_of(folder) - before
    manifest = {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "commit": machine.commit_of(root),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "bytes": sizes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for name, size_bytes in sizes.items():
        print(f"{name:17} {size_bytes / 2**20:6.1f} MiB")
    packed_bytes, tracked_bytes = size_of(folder), size_of_tracked(root)
    print(
        f"{FOLDER}: {packed_bytes / 2**20:.1f} MiB, with the tracked files {(packed_bytes + tracked_bytes) / 2**20:.1f}"
    )
    for name in missing:
        print(f"pack: {name} was not found on this machine", file=sys.stderr)
    if packed_bytes + tracked_bytes > MOST_BYTES:
        print(f"pack: more than the {MOST_BYTES / 2**20:.0f} MiB that may travel", file=sys.stderr)
        return 1
    return 1 if missing else 0


def add_piece(piece: Piece, folder: Path) -> bool:
    for prefix in PREFIXES:
        places = {
            "include": (Path("include") / TRIPLET, Path("include")),
            "lib": (Path("lib") / TRIPLET, Path("lib")),
            "cmake": (Path("lib") / TRIPLET / "cmake", Path("lib") / "cmake", Path("share") / "cmake"),
        }
        headers = find(prefix, places["include"], piece.headers)
        libraries = find(prefix, places["lib"], piece.libraries)
        packages = find(prefix, places["cmake"], piece.cmake)
        if not (headers and (libraries or not piece.libraries) and (packages or not piece.cmake)):
            continue
        for path in headers:
            copy(path, folder / "include" / path.name)
        for path in libraries:
            add_library(path, folder / path.relative_to(prefix))
        for path in packages:
            copy(path, folder / path.relative_to(prefix))
        return True
    return False


def find(prefix: Path, places: tuple[Path, ...], patterns: tuple[str, ...]) -> list[Path]:
    return [path for place in places for pattern in patterns for path in sorted((prefix / place).glob(pattern))]


def copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, to, dirs_exist_ok=True)
    else:
        shutil.copy(path, to)


def add_library(path: Path, to: Path) -> None:
    """Of a library with several names the file once, the other names as links to it."""
    real = path.resolve()
    to.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink() or path.name == "libz.so":
        shutil.copy(real, to)
        return
    file = to.parent / real.name
    if not file.exists():
        shutil.copy(real, file)
    if to.name != file.name and not to.is_symlink():
        to.symlink_to(file.name)


def add_program(name: str, folder: Path) -> bool:
    """The program with the libraries it was linked with, but those of the C library, and a script that joins them. By
    the loader, since a variable would reach what `ip netns exec` starts."""
    program = shutil.which(name)
    if program is None:
        return False
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    libraries = folder / "lib" / "of_programs"
    libraries.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(program).resolve(), libraries / name)
    loader = ""
    for line in machine.output_of(["ldd", program]).splitlines():
        soname, _, rest = line.strip().partition(" => ")
        if soname.startswith("/"):
            loader = soname.partition(" ")[0]
        if rest and not soname.startswith(("libc.", "libm.", "libdl.", "libpthread.", "librt.")):
            shutil.copy(rest.partition(" (")[0], libraries / soname)
    script = folder / "bin" / name
    script.write_text(
        '#!/bin/sh\nhere="$(dirname "$(readlink -f "$0")")/../lib/of_programs"\n'
        f'exec {loader} --library-path "$here" "$here/{name}" "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return True


def add_module(name: str, python: str, folder: Path) -> bool:
    where = machine.output_of([python, "-c", f"import {name}; print({name}.__path__[0])"])
    if not where:
        return False
    shutil.copytree(where, folder / "python" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return True


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def size_of_tracked(root: Path) -> int:
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False)
    paths = [root / name for name in listed.stdout.split("\0") if name]
    return sum(path.lstat().st_size for path in paths if path.exists())
