# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Measures what collectives and codecs take over a process group."""

import argparse
import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from . import _core
from .agreement import agree_on_text, on_all_ranks
from .device_engine import LIBRARY, VARIABLE, find_library
from .errors import CortadoError, SpecError
from .group import TorchGroup
from .profiles import Cluster

_BAR = 30


def calibrate(
    process_group=None,
    *,
    codecs=None,
    budget_s=50.0,
    name="calibrated",
    device=None,
    known=None,
    note=None,
    progress=None,
):
    """Measures links and codecs of ``process_group`` (default: the whole world); returns a Cluster, equal on all ranks.

    Call it on every rank, with nothing else running.

    codecs: codec strings to measure; default: those that auto knows.
    budget_s: about how long it may take.
    device: "cuda", or each rank's own torch.device there: codecs that have a variant on it, copies to it and back, and
        what those codecs do to computation there are measured, too. All ranks give one, or none does.
    known: a Cluster measured before (that of rank 0 counts). If it is of these machines and this communicator, what it
        holds is kept and only what is missing is measured.
    note: called on this rank with a line about what is kept of it; or None.
    progress: called on this rank with the share that is done and what comes next; or None.
    """
    if not dist.is_initialized():
        raise CortadoError("calibrate needs a process group: call torch.distributed.init_process_group first")
    wrapped = TorchGroup(process_group)
    wrapped.set_timeout(300.0)
    version = f"torch {torch.__version__}"
    with on_all_ranks(wrapped, "could not calibrate"):
        specs = default_codecs() if codecs is None else [codecs] if isinstance(codecs, str) else list(codecs)
        specs = [_core.canonical_spec(spec) for spec in specs]
        budget_s, name = float(budget_s), str(name)
        if known is not None and not isinstance(known, Cluster):
            raise SpecError(f"known: expected a Cluster, such as Cluster.load(path), got {type(known).__name__}")
        known_text = None if known is None else known.to_json()
        on_device = {} if device is None else _on_device(torch.device(device))
    on = "CPU and a device" if on_device else "CPU"
    what = f"for {budget_s:g} s, as {name!r}, {on}: {', '.join(specs)}"
    agree_on_text(wrapped, "the arguments of calibrate", what)
    wrapped.connect_both_ways()
    return Cluster(
        _core.calibrate(
            *(wrapped, wrapped.rank, wrapped.world_size, wrapped.name, specs, budget_s, name, version),
            *(known_text, note, progress),
            **on_device,
        )
    )


def _on_device(device):
    """What _core.calibrate is told of a device."""
    if device.type != "cuda":
        raise SpecError(f'device: expected "cuda" or a device of it, got "{device}"; the CPU is always measured')
    found = find_library(LIBRARY, VARIABLE)
    if found.library is None:
        raise CortadoError(f"nothing can be measured on {device}: {found.reason}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"device_library": found.library, "device": index, "computation": _Products(torch.device("cuda", index))}


class _Products:
    """Stands for a backward pass on a device: products of matrices, in a stream of its own; waits for them."""

    def __init__(self, device):
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self._factor = torch.randn(2048, 2048, device=device)
            self._product = torch.empty_like(self._factor)

    def __call__(self):
        with torch.cuda.stream(self._stream):
            for _ in range(8):
                torch.mm(self._factor, self._factor, out=self._product)
        self._stream.synchronize()


def _read_or_refuse(path, again):
    """What the file holds, if it is there and is to count; an error where none can be written, before measuring."""
    is_there = path.exists()
    if not os.access(path if is_there else path.absolute().parent, os.W_OK) or path.is_dir():
        raise SpecError(f'no file can be written at "{path}"')
    if again or not path.is_file() or path.stat().st_size == 0:  # an empty file, or none, is there to be written
        return None
    try:
        return Cluster.load(path)
    except CortadoError as error:
        raise type(error)(f"{error}; --again measures anew and overwrites it", error.code) from error


def default_codecs():
    """Every codec that auto may use, at any quality."""
    return _core.auto_codecs()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m cortado.calibrate",
        description="Measures what collectives and codecs take, on the ranks that torchrun has started:"
        " torchrun --nproc-per-node 4 -m cortado.calibrate -o cluster.json",
    )
    parser.add_argument("-o", "--output", required=True, metavar="CLUSTER", help="the file to write")
    parser.add_argument(
        "--backend", default="gloo", help="one that sends what lies in host memory; default: %(default)s"
    )
    parser.add_argument("--codec", action="append", metavar="SPEC", help="measure this one, again for more")
    parser.add_argument("--budget", type=float, default=50.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument(
        "--device", choices=["cuda"], help="measure this rank's GPU, too: codecs on it, copies, contention"
    )
    parser.add_argument("--name", default="calibrated", help="of the cluster, for reports")
    parser.add_argument(
        "--again", action="store_true", help="measure everything, also what the file holds if it is there already"
    )
    options = parser.parse_args(arguments)
    try:
        dist.init_process_group(options.backend, timeout=timedelta(seconds=300))
    except ValueError as error:
        parser.error(f"no process group could be made; start it with torchrun ({error})")
    try:
        speaks = dist.get_rank() == 0
        shows = speaks and sys.stderr.isatty()
        known = None
        with on_all_ranks(TorchGroup(None), f"could not use {options.output}"):
            if speaks:
                known = _read_or_refuse(Path(options.output), options.again)
        cluster = calibrate(
            codecs=options.codec,
            budget_s=options.budget,
            name=options.name,
            device=options.device and own_device(options.device),
            known=known,
            note=(lambda line: print(f"{options.output}: {line}", file=sys.stderr)) if speaks else None,
            progress=_show_progress if shows else None,
        )
        if dist.get_rank() == 0:
            cluster.save(options.output)
            print(f"{options.output}: {summary(cluster)}")
    except CortadoError as error:
        print(f"cortado: {error}", file=sys.stderr)
        return 2
    finally:
        gc.collect()  # a TorchGroup refers to itself, and must not outlive the process group
        dist.destroy_process_group()
    return 0


def own_device(kind):
    """Of this rank of its machine, in order; where there are more ranks than devices, they share them."""
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    return torch.device(kind, local_rank % count if count > 0 else local_rank)


def summary(cluster):
    content = cluster.to_dict()
    levels = ", ".join(f"{level['ranks']} ranks ({level['name']})" for level in content["levels"])
    codecs = len({entry["codec"] for entry in content.get("codecs", [])})
    return f"{levels}, {codecs} codecs, over {content['host']['communicator']}"


def _show_progress(done, following):
    filled = round(done * _BAR)
    bar = "#" * filled + "-" * (_BAR - filled)
    end = "\n" if done >= 1 else ""
    print(f"\r[{bar}] {100 * done:3.0f} %  {following[:44]:<44}", end=end, file=sys.stderr, flush=True)
