# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Tensors that one rank each has computed, for all ranks, compressed: for K-FAC, Shampoo, Muon and the like."""

import math
import numbers
import operator
import warnings

import torch
import torch.distributed as dist

from . import _core
from .agreement import SETUP_TIMEOUT_S, agree_on_flag, agree_on_text, damage_ends_all, on_all_ranks
from .errors import CortadoError, MismatchError, SpecError
from .group import DTYPE_CODES, TorchGroup
from .kfac_options import check_types
from .saved_state import array_of, check_state
from .side_stream import device_of, side_stream_of
from .spec import spec_from

_STATE_FORMAT = "cortado.owner_gather/1"


def compressed_all_gather(tensors, owners, codec="none", **options):
    """Gives every rank the tensors that their owners have computed, in place, and the same bytes to all.

    tensors: a list of tensors, equal in shapes and dtypes on all ranks, in host memory or on one CUDA device; those
    that a rank owns hold its values.
    owners: the rank that owns each. codec: a string or dict ("compso(bound=4e-3)", "quant(bits=8)").

    For one exchange. Ranks first compare what they were given; where the same tensors are exchanged in every step, make
    a CompressedAllGather once, which also takes the options and has a report().
    """
    CompressedAllGather(tensors, owners, codec, **options)(tensors)


class CompressedAllGather:
    """An exchange that is repeated: of tensors that always have the same shapes and owners.

        gather = cortado.CompressedAllGather(updates, owners, "compso(error=0.1, round=dead_zone)", error_feedback=True)
        gather(updates)      # every step, on all ranks

    The owner of a tensor gets the decoded values too, so all ranks hold the same. error_feedback: the owner adds to a
    tensor what encoding it has lost so far. aggregate: tensors that share a table of codes in ``compso``; 0: all.
    check_collectives: as for cortado.attach.

    Tensors of a CUDA device travel through pinned host memory, which is kept: a copy of all tensors. They are read
    behind what the current stream has been given, and what it is given next comes after they are written.
    """

    def __init__(
        self,
        tensors,
        owners,
        codec="none",
        *,
        error_feedback=False,
        aggregate=0,
        process_group=None,
        random_seed=0,
        timeout_s=1800.0,
        check_collectives=False,
    ):
        if not dist.is_initialized():
            raise CortadoError("a gather needs a process group: call torch.distributed.init_process_group first")
        self._group = group = TorchGroup(process_group)
        is_time = isinstance(timeout_s, numbers.Real) and timeout_s > 0
        with on_all_ranks(group, "could not make a CompressedAllGather", timeout_s if is_time else SETUP_TIMEOUT_S):
            check_types(float, timeout_s=timeout_s)
            check_types(bool, error_feedback=error_feedback)
            check_types(int, aggregate=aggregate, random_seed=random_seed)
            if len(tensors) != len(owners):
                raise SpecError(f"expected one owner a tensor, got {len(tensors)} tensors and {len(owners)} owners")
            owners = [_rank_of(i, owner) for i, owner in enumerate(owners)]
            self._shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            self._device = device_of([(_name(i), tensor, None) for i, tensor in enumerate(tensors)])
            described = [
                self._describe(i, tensor, owner) for i, (tensor, owner) in enumerate(zip(tensors, owners, strict=True))
            ]
            self._spec = spec_from(codec)
            self._side_stream = stream = side_stream_of(self._device)
            if stream is not None:
                self._read = stream.event()
                shaped = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self._shapes]
                self._hosts = [stream.host_memory(like) for like in shaped]
        agree_on_flag(group, "check_collectives", check_collectives, timeout_s)
        self._keeps = error_feedback
        self._owned = [i for i, owner in enumerate(owners) if owner == group.rank]
        with damage_ends_all(group):
            self._core = _core.OwnerGather(
                described,
                self._spec,
                error_feedback,
                aggregate,
                random_seed,
                timeout_s,
                group,
                group.rank,
                group.world_size,
                group.name,
                check_collectives,
            )
        group.connect_both_ways()
        group.set_timeout(timeout_s)
        self._timeout_s = timeout_s
        self._step = 0

    @staticmethod
    def _describe(index, tensor, owner):
        if tensor.dtype not in DTYPE_CODES:
            raise SpecError(f"tensor {index} is {tensor.dtype}; expected float32, float16 or bfloat16")
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        cols = tensor.numel() // rows if rows else 0
        return (_name(index), DTYPE_CODES[tensor.dtype], rows, cols, owner)

    @torch.no_grad()
    def __call__(self, tensors):
        """One exchange, in place."""
        try:
            self._check(tensors)
            hosts = self._fetch(tensors)
        except Exception as error:
            self._group.announce(str(error))  # or the other ranks would wait for this one
            raise
        self._core.run(self._step, [host.data_ptr() for host in hosts])
        self._step += 1
        try:
            self._send(tensors, hosts)
        except Exception as error:
            self._group.announce(str(error))  # the others, whose exchange has ended, hear of it in the next one
            raise

    def _check(self, tensors):
        if [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] != self._shapes:
            raise SpecError("these tensors have other shapes or dtypes than those the gather was made for")
        for index, tensor in enumerate(tensors):
            if tensor.device != self._device:
                raise SpecError(
                    f"tensor {index} is on {tensor.device}, expected {self._device}, as when the gather was made"
                )

    def _fetch(self, tensors):
        """Where the core reads and writes them: contiguous, in host memory."""
        stream = self._side_stream
        if stream is None:
            return [tensor.contiguous() for tensor in tensors]
        stream.follow()
        for i in self._owned:
            stream.fetch(self._hosts[i], tensors[i])
        stream.record(self._read)  # behind what the exchange before has sent from there
        self._read.synchronize()
        return self._hosts

    def _send(self, tensors, hosts):
        stream = self._side_stream
        if stream is not None:
            for tensor, host in zip(tensors, hosts, strict=True):
                stream.send(tensor, host)
            stream.join()
            return
        for tensor, host in zip(tensors, hosts, strict=True):
            if tensor.data_ptr() != host.data_ptr():
                tensor.copy_(host)

    def set_codec(self, codec):
        """From the next exchange on; on all ranks together. If one of them refuses, all do, and nothing changes."""
        try:
            with on_all_ranks(self._group, "could not change its codec", self._timeout_s):
                spec = spec_from(codec)
                self._core.set_codec(spec)
        except CortadoError:
            self._core.set_codec(self._spec)
            raise
        self._spec = spec

    def report(self):
        """Bytes, error, collectives of the last exchange; times of encode, gather and decode over all, in ns."""
        return self._core.report()

    def state_dict(self):
        """What this rank still owes of the tensors it owns, and the step; every rank saves its own."""
        residuals = {name: torch.from_numpy(values) for name, values in self._core.save_residuals().items()}
        world_size = self._group.world_size
        return {"format": _STATE_FORMAT, "world_size": world_size, "step": self._step, "residuals": residuals}

    def load_state_dict(self, state):
        """Continues where state_dict() was taken; call it on every rank, at about the same time.

        state: this rank's own, or the list of the states of all ranks, from which other owners, and another number of
        ranks, find what they need. What is owed of a tensor that is in none of them begins at zero, and a warning says
        of how many. If a state does not fit on one rank, all get an error and nothing has changed.
        """
        states = state if isinstance(state, (list, tuple)) else [state]
        with on_all_ranks(self._group, "could not load its state", self._timeout_s):
            residuals = {}
            for one in states:
                residuals.update(self._residuals_of(one))
            steps = sorted({one["step"] for one in states})
            if len(steps) != 1:
                raise MismatchError(f"expected states of one step, got {steps or 'none'}")
        agree_on_text(self._group, "the steps of the states", str(steps[0]), self._timeout_s)
        self._core.load_residuals(residuals)
        self._step = steps[0]
        keeping = [i for i in self._owned if self._keeps and math.prod(self._shapes[i][0])]
        missing = [i for i in keeping if _name(i) not in residuals]
        if missing:
            warnings.warn(
                f"cortado.CompressedAllGather: the state given lacks what is still owed of {len(missing)} tensors that "
                f"rank {self._group.rank} owns (saved with world size {states[0].get('world_size', 'unknown')}, loaded "
                f"with {self._group.world_size}); it begins at zero. Give the states of all ranks to keep it",
                stacklevel=2,
            )

    def _residuals_of(self, state):
        """Checked, as numpy arrays by name."""
        check_state(state, _STATE_FORMAT, step=int, residuals=dict)
        elems = {_name(i): math.prod(shape) for i, (shape, _) in enumerate(self._shapes)}
        residuals = {}
        for name, values in state["residuals"].items():
            array = array_of(f'residuals["{name}"]', values)
            if array.size != elems.get(name):
                text = f"the state owes {array.size} values of {name}, expected {elems.get(name, 'no such tensor')}"
                raise MismatchError(text)
            if not bool(torch.isfinite(values).all()):
                raise MismatchError(f"what the state owes of {name} has an Inf or NaN")
            residuals[name] = array
        return residuals


def _rank_of(index, owner):
    try:
        return operator.index(owner)
    except TypeError:
        raise SpecError(f"the owner of tensor {index} must be a rank, got {owner!r}") from None


def _name(index):
    return f"tensor {index}"
