# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What lightning.py, accelerate.py and transformers.py share: attaching to what a framework made of a model, and its
state in their checkpoints."""

import pickle
import re
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .agreement import agree_on_flag, on_all_ranks
from .ddp import attach
from .errors import MismatchError
from .group import takes_host_memory
from .parameters import without_compile


def attach_to(module, plan, options, grad_scaler=None):
    """attach() with ``options``, where the framework's scaler is known and NCCL gets a group of Gloo beside it. Returns
    None, and says so, where a single process trains: there is nothing to exchange."""
    ddp = without_compile(module)
    is_ddp = isinstance(ddp, DistributedDataParallel)
    if not is_ddp and (not dist.is_initialized() or dist.get_world_size() == 1):
        if options.get("verbose", True):
            print("cortado: a single process trains, so there is nothing to exchange", file=sys.stderr)
        return None
    options = {"grad_scaler": grad_scaler, **options}
    if is_ddp and not takes_host_memory(ddp.process_group) and options.get("process_group") is None:
        options["process_group"] = dist.new_group(backend="gloo")
    return attach(module, plan, **options)


def load_on_all_ranks(state, holder, load):
    """Gives ``state`` what ``load`` returns; load is None where this rank found nothing in ``holder``, a text. Every
    rank calls it."""
    group, timeout_s = state._group, state._engine.timeout_s
    agree_on_flag(group, f"whether {holder} holds a state of cortado", load is not None, timeout_s)
    if load is not None:
        with on_all_ranks(group, f"could not read its state from {holder}", timeout_s):
            loaded = load()
        state.load_state_dict(loaded)
    elif group.rank == 0:
        print(f"cortado: {holder} holds no state of cortado: residuals and factors start anew", file=sys.stderr)


def save_in_folder(state, folder, prefix="cortado"):
    """Writes ``prefix``_RANK.pt, in place of what more ranks have left there. Every rank calls it."""
    group = state._group
    if group.rank == 0:
        for rank, path in _files(folder, prefix).items():
            if rank >= group.world_size:
                path.unlink()
    torch.save(state.state_dict(), Path(folder) / f"{prefix}_{group.rank}.pt")


def load_from_folder(state, folder, prefix="cortado"):
    """Reads what save_in_folder() wrote; with another number of ranks, that of any. Every rank calls it."""
    files = _files(folder, prefix)
    # load_state_dict() refuses another rank's, unless there were more ranks or fewer.
    path = files.get(state._group.rank, files[min(files)] if files else None)
    load_on_all_ranks(state, str(folder), path and partial(_read, path))


def _files(folder, prefix):
    """By rank."""
    matches = [(re.fullmatch(rf"{prefix}_(\d+)\.pt", path.name), path) for path in Path(folder).glob(f"{prefix}_*.pt")]
    return {int(match[1]): path for match, path in matches if match}


def _read(path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise MismatchError(f"{path}: expected a state of cortado, which torch.load() reads: {error}") from error
