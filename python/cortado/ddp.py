# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The adapter for torch.nn.parallel.DistributedDataParallel: a communication hook that feeds the C++ engine.

DDP calls the hook once a bucket, in an order that all ranks share. Each call hands the bucket's gradients to the
engine, which compresses them and starts the messages that became complete; the call for the last bucket waits for
everything, so that no thread of ours runs beside the training's own.
"""

import math
import sys
import time
import weakref

import torch
import torch.distributed as dist

from . import _core
from .agreement import SETUP_TIMEOUT_S, on_all_ranks
from .errors import CortadoError, MismatchError, SpecError
from .group import DTYPE_CODES, TorchGroup
from .reporting import Report
from .spec import spec_from

_STATE_FORMAT = "cortado.state/1"

_states = weakref.WeakKeyDictionary()  # DDP module -> DdpState
_failed = []  # states whose collectives may still write to the engine's memory; kept until the process ends


def attach(ddp, plan="auto", *, grad_scaler=None, verbose=True):
    """Makes ``ddp`` exchange its gradients as ``plan`` says; returns the state. Call it on every rank, before backward.

    plan: a codec string such as "acp(rank=4)" or "topk(density=0.01) | quant(bits=4)", a dict such as
        {"codec": "acp", "rank": 4}, or a path ending in .json.
    grad_scaler: the torch.amp.GradScaler (or anything with get_scale()) whose scale the gradients carry, if any.
    verbose: rank 0 prints one line about what is compressed and one about memory to stderr.

    The returned state has state_dict(), load_state_dict() and report().
    """
    is_ddp = isinstance(ddp, torch.nn.parallel.DistributedDataParallel)
    refusal = _refusal(ddp)
    if not dist.is_initialized():
        raise refusal or CortadoError("attach needs a process group: call torch.distributed.init_process_group first")
    state = DdpState(plan, ddp, ddp.process_group if is_ddp else None, grad_scaler, verbose, refusal=refusal)
    try:
        ddp.register_comm_hook(state, hook)
    except RuntimeError as error:
        raise CortadoError(f"DDP refuses a communication hook: {error}") from error
    _states[ddp] = state
    return state


def _refusal(ddp):
    """The error that keeps this model from being attached, if any; told to all ranks before it is raised."""
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        got = f"{type(ddp).__name__}{fsdp_hint(ddp)}"
        return SpecError(f"cortado.attach needs a torch.nn.parallel.DistributedDataParallel, got {got}")
    if ddp in _states:
        return CortadoError(f'this model is attached already, with "{_states[ddp].spec}"; build a new DDP to change it')
    if getattr(ddp, "_comm_hooks", None):
        return CortadoError("this model has another communication hook, and DDP takes only one")
    if _has_run_backward(ddp):
        return CortadoError(
            "attach before the first backward: this model has gradients, or has exchanged some, already"
        )
    return None


def ddp_hook(plan, model, *, process_group=None, grad_scaler=None, verbose=True):
    """The (state, hook) pair for ``ddp.register_comm_hook`` or Lightning's DDPStrategy.

    model is the module that will be wrapped (or the DDP itself); it gives the parameters their names.
    """
    if process_group is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        process_group = model.process_group
    return DdpState(plan, model, process_group, grad_scaler, verbose), hook


def report(ddp):
    """The report of an attached model (or of a state)."""
    state = ddp if isinstance(ddp, DdpState) else _states.get(ddp)
    if state is None:
        raise CortadoError("nothing to report: this model has not been attached")
    return state.report()


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook."""
    return state.on_bucket(bucket)


class DdpState:
    """One model's compression: what DDP passes to the hook. Make it with attach() or ddp_hook()."""

    def __init__(self, plan, model, process_group, grad_scaler, verbose, *, refusal=None):
        self._group = TorchGroup(process_group)
        self._grad_scaler = grad_scaler
        self._engine = self._make_engine(plan, model, refusal)
        self._group.set_timeout(self._engine.timeout_s)
        self.spec = self._engine.spec
        self._maps = {}  # bucket index -> (parameters, BucketMap)
        self._pending = []
        self._step_begun = False
        self._copies = []  # gradients copied into DDP's memory layout to undo a step
        self._hook_ns = 0
        if verbose and self._group.rank == 0:
            print(self._engine.describe(), file=sys.stderr, flush=True)

    def _make_engine(self, plan, model, refusal):
        with on_all_ranks(self._group, "could not attach"):
            if refusal is not None:
                raise refusal
            spec = _core.canonical_spec(spec_from(plan))
            self._parameters, tensors = _list_tensors(model)
        scaled = self._group.all_gather(b"\1" if self._grad_scaler is not None else b"\0", SETUP_TIMEOUT_S)
        if len(set(scaled)) > 1:
            without = ", ".join(str(rank) for rank, has in enumerate(scaled) if not has)
            raise MismatchError(f"some ranks were attached with a grad_scaler, rank {without} without", "mismatch")
        self._index = {parameter: i for i, parameter in enumerate(self._parameters)}
        return _core.Engine(tensors, spec, self._group, self._group.rank, self._group.world_size, self._group.name)

    # ---- the hook

    def on_bucket(self, bucket):
        start_ns = time.perf_counter_ns()
        try:
            future = self._exchange(bucket)
        except BaseException as error:
            self._engine.abandon(str(error))
            self._group.announce(str(error))
            if self not in _failed:
                _failed.append(self)
            raise
        self._hook_ns += time.perf_counter_ns() - start_ns
        return future

    def _exchange(self, bucket):
        buffer = bucket.buffer()
        if not self._step_begun:
            self._begin(bucket, buffer)
        if self._engine.sends_buffers:
            if buffer.numel():
                self._engine.submit_buffer(buffer.data_ptr(), buffer.numel(), DTYPE_CODES[buffer.dtype])
        else:
            self._engine.submit(self._map(bucket, buffer), buffer.data_ptr())
        future = torch.futures.Future()
        self._pending.append((future, buffer))
        if bucket.is_last():
            self._finish()
        return future

    def _begin(self, bucket, buffer):
        if buffer.is_sparse or buffer.device.type != "cpu":
            raise SpecError(
                f"cortado exchanges dense CPU gradients for now; this bucket is {buffer.layout} on {buffer.device}"
            )
        scale = float(self._grad_scaler.get_scale()) if self._grad_scaler is not None else 1.0
        # DDP drops what arrives for a parameter that no rank has used (find_unused_parameters), so nothing may be owed.
        self._engine.begin_step(scale, self._keeps_gradients(bucket), holds_zero_gradients=True)
        self._step_begun = True

    @staticmethod
    def _keeps_gradients(bucket):
        """True if DDP keeps the local gradients beside its bucket (gradient_as_bucket_view=False)."""
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.grad is not None and view.numel():
                return parameter.grad.data_ptr() != view.data_ptr()
        return False

    def _map(self, bucket, buffer):
        """Where each tensor lies in the bucket; kept until DDP rebuilds its buckets."""
        parameters = bucket.parameters()
        known = self._maps.get(bucket.index())
        if known is not None and len(known[0]) == len(parameters):
            if all(a is b for a, b in zip(known[0], parameters, strict=True)):
                return known[1]
        tensors, offsets = [], []
        for parameter, view in zip(parameters, bucket.gradients(), strict=True):
            index = self._index.get(parameter)
            if index is None:
                raise MismatchError(
                    f"a gradient of shape {tuple(parameter.shape)} belongs to no named parameter of the model that "
                    "cortado was given; residuals are kept by name"
                )
            tensors.append(index)
            offsets.append(view.data_ptr() - buffer.data_ptr() if view.numel() else 0)
        made = _core.BucketMap(tensors, offsets)
        self._maps[bucket.index()] = (parameters, made)
        return made

    def _finish(self):
        self._engine.finish_step(self._local_gradient)
        pending, self._pending = self._pending, []
        self._step_begun = False
        self._copies.clear()
        for future, buffer in pending:
            future.set_result(buffer)

    def _local_gradient(self, index):
        """Address of the gradient that DDP kept for tensor ``index``, in the memory order of its bucket; 0 if None."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return 0
        if parameter.is_contiguous() or not _is_dense(parameter):
            gradient = gradient.contiguous()
        elif gradient.stride() != parameter.stride():
            gradient = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype).copy_(gradient)
        self._copies.append(gradient)
        return gradient.data_ptr()

    # ---- what users call

    def report(self):
        values = self._engine.report()
        values["hook_ns"] = self._hook_ns
        return Report(values)

    def state_dict(self):
        """This rank's residuals, factors, velocities and step, keyed by parameter name; every rank saves its own."""
        state = self._engine.save_state()
        for entry in state["tensors"].values():
            for key in entry:
                entry[key] = torch.from_numpy(entry[key])
        return state

    def load_state_dict(self, state):
        """Continues where state_dict() was taken. Call it on every rank, each with its own rank's state.

        With another world size residuals start at zero and a warning says so; everything else is kept.
        """
        with on_all_ranks(self._group, "could not load its state"):
            arrays = _arrays_of(state)
        warning = self._engine.load_state(arrays)
        if warning and self._group.rank == 0:
            print(f"cortado: {warning}", file=sys.stderr, flush=True)

    def start_trace(self, capacity=100_000):
        """Records up to ``capacity`` stage events from the next step on."""
        self._engine.start_trace(capacity)

    def write_trace(self, path):
        """Writes the recorded events as a Chrome trace."""
        self._engine.write_trace(str(path))


def _arrays_of(state):
    """The state with numpy arrays in place of tensors."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != _STATE_FORMAT:
        raise MismatchError(f'load_state_dict expects a state of format "{_STATE_FORMAT}", got {found!r}', "mismatch")
    missing = [
        key for key in ("spec", "world_size", "rank", "step", "phase_step", "layout", "tensors") if key not in state
    ]
    if missing:
        raise MismatchError(f"load_state_dict: the state lacks {', '.join(missing)}", "mismatch")
    tensors = {}
    for name, entry in state["tensors"].items():
        entry = {"velocity": torch.empty(0), **entry}  # states of earlier versions lack it
        tensors[name] = {key: entry[key].float().contiguous().numpy() for key in ("residual", "basis", "velocity")}
    return {**state, "tensors": tensors}


def _list_tensors(model):
    """Parameters that DDP exchanges, and what the engine must know of each, in the order of registration."""
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    module = model.module if is_ddp else model
    ignored = set(model.parameters_to_ignore if is_ddp else getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    if fsdp_hint(module):
        raise SpecError(f"{type(module).__name__}{fsdp_hint(module)}")
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))}
    parameters, tensors = [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or name in ignored:
            continue
        if parameter.dtype not in DTYPE_CODES:
            raise SpecError(
                f'parameter "{name}" has dtype {parameter.dtype}; cortado exchanges float32, float16 and bfloat16'
            )
        rows, cols = _matrix_shape(parameter)
        parameters.append(parameter)
        tensors.append((name, DTYPE_CODES[parameter.dtype], rows, cols, parameter.dim(), id(parameter) in embeddings))
    return parameters, tensors


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


def fsdp_hint(module):
    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    bases = {base.__name__ for part in parts for base in type(part).__mro__}
    fsdp = bases & {"FullyShardedDataParallel", "FSDPModule"}
    return ": FSDP is not supported yet; use DistributedDataParallel" if fsdp else ""


def _has_run_backward(ddp):
    return any(p.grad is not None for p in ddp.parameters()) or any(ddp.reducer.get_backward_stats())
