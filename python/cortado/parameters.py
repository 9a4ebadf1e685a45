# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What the engine must know of a parameter, and how the memory of its gradient is read."""

import math

import torch

from .errors import SpecError
from .group import DTYPE_CODES

IF_SHARDED = ", or fully_shard within each replica and cortado.Reducer between them (docs/training.md)"

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def without_compile(module):
    """The DDP module that torch.compile has wrapped, if it is one; else ``module``."""
    inside = getattr(module, "_orig_mod", None)
    return inside if isinstance(inside, torch.nn.parallel.DistributedDataParallel) else module


def is_sharded(tensor):
    """Whether each rank holds a part of it: a DTensor, as fully_shard (FSDP2) makes them."""
    return type(tensor).__name__ == "DTensor"


def is_later_shard(tensor):
    """Whether it is a part of a sharded tensor, and not the first: of another rank of the same replica."""
    return is_sharded(tensor) and any(tensor.device_mesh.get_coordinate() or ())


def local_of(tensor):
    """What this rank holds of a sharded tensor, in the same memory; else ``tensor``."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor


def reshard(module):
    """Behind a forward pass alone some parts of what fully_shard shards still have their parameters whole."""
    for part in module.modules():
        if "FSDPModule" in {base.__name__ for base in type(part).__mro__}:
            part.reshard()


def trainable_of(module, left_out=(), *, takes_sharded=False):
    """(name, parameter, is it an embedding) of all that ``module`` trains, in the order of registration, without those
    in ``left_out``. takes_sharded: those of fully_shard, too."""
    hint = fsdp_hint(module, takes_sharded)
    if hint:
        raise SpecError(f"{type(module).__name__}{hint}{'' if takes_sharded else IF_SHARDED}")
    embeddings = {id(m.weight): m for m in module.modules() if isinstance(m, _EMBEDDINGS)}
    found = [
        (name, parameter, id(parameter) in embeddings)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter not in left_out
    ]
    for name, parameter, is_embedding in found:
        if is_embedding and embeddings[id(parameter)].sparse:
            raise SpecError(f'the gradient of "{name}" is sparse; cortado exchanges dense ones: sparse=False')
    return found


def ignored_by_ddp(module, names):
    """The set of parameters of ``module`` that DDP leaves alone, told to ignore ``names``. As it compares them a
    parameter of the root is ".weight", and one with several names is left alone if all of them are."""
    kept, ignored = set(), set()
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            (ignored if f"{prefix}.{name}" in names else kept).add(parameter)
    return ignored - kept


def engine_tensors(named):
    """The engine's description of each of ``named``, a list as trainable_of() gives it."""
    tensors = []
    for name, parameter, is_embedding in named:
        if parameter.dtype not in DTYPE_CODES:
            raise SpecError(
                f'parameter "{name}" has dtype {parameter.dtype}; cortado exchanges float32, float16 and bfloat16'
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise SpecError(
                f'parameter "{name}" has an optimizer that steps in the backward pass '
                "(_apply_optimizer_in_backward), before its gradient has been averaged here: step after it"
            )
        rows, cols = _matrix_shape(local_of(parameter))
        tensors.append((name, DTYPE_CODES[parameter.dtype], rows, cols, parameter.dim(), is_embedding))
    return tensors


def in_memory_order(parameter, gradient):
    """``gradient``, or a copy of it, whose elements lie one after the other in the memory order of ``parameter``."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return gradient.contiguous()
    if gradient.stride() == parameter.stride():
        return gradient
    like_gradient = {"dtype": gradient.dtype, "device": gradient.device}
    return torch.empty_strided(parameter.shape, parameter.stride(), **like_gradient).copy_(gradient)


def fsdp_hint(module, takes_sharded=False):
    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    bases = {base.__name__ for part in parts for base in type(part).__mro__}
    refused = {"FullyShardedDataParallel"} if takes_sharded else {"FullyShardedDataParallel", "FSDPModule"}
    return ": FSDP is not supported here; use DistributedDataParallel" if bases & refused else ""


def _is_dense(parameter):
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _matrix_shape(parameter):
    """The parameter's memory as rows x cols: the outermost dimension in memory, and everything inside it.

    Which columns stand where does not matter to a low-rank factor, so channels-last and transposed parameters need no
    copy.
    """
    if parameter.dim() < 2:
        return 1, parameter.numel()
    rows = parameter.shape[0]
    if _is_dense(parameter) and not parameter.is_contiguous():
        rows = parameter.shape[max(range(parameter.dim()), key=lambda d: (parameter.stride(d), parameter.shape[d]))]
    return rows, (parameter.numel() // rows if rows else math.prod(parameter.shape[1:]))
