# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Measures what one training step of a model is made of, into a job file."""

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Mapping

import torch

from . import _core
from .attachment import holder_of
from .errors import SpecError
from .kfac import has_kfac
from .parameters import without_compile
from .profiles import Job
from .reducer import Reducer

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def profile(model, batch, *, loss=None, optimizer=None, codecs=None, steps=5, name=None):
    """Runs some steps of ``model`` without communication and returns a Job (cortado.job/1), on this rank alone.

    model: a module, or one under DDP, whose module then runs without DDP. Gradients are cleared before and after;
        parameters, buffers (running statistics) and the state of a torch.optim.Optimizer are afterwards as before.
    batch: what the module takes, on its device: a tuple of arguments, a dict, or one argument. Or a function without
        arguments that runs the forward pass and returns the scalar loss; it had better call the module inside DDP, as
        DDP itself may broadcast buffers, and wait for other ranks.
    loss: makes the scalar loss of the model's output; default: the output itself, or its ``loss``.
    optimizer: if given, its step is timed, on zero gradients.
    codecs: codec strings whose error is measured on the real gradients; default: all that auto knows; [] for none.
    steps: of them medians are taken; two more go before.
    name: of the job; default: the model's class.

    Ready times are those of this machine with nothing else running; on a GPU the device is waited for at each gradient.
    """
    model = without_compile(model)
    if not isinstance(model, torch.nn.Module):
        raise SpecError(f"profile needs a module, got {type(model).__name__}")
    if steps < 1:
        raise SpecError(f"profile needs at least one step, got {steps}")
    plain = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    named = [(key, parameter) for key, parameter in plain.named_parameters() if parameter.requires_grad]
    if not named:
        raise SpecError(f"{type(plain).__name__} has no parameter that is trained: there is nothing to profile")
    _refuse_what_takes_part(plain, [parameter for _, parameter in named])
    recorder = _Recorder(named)
    forward = _forward_of(plain, batch, loss)
    syncs_off = model.no_sync if model is not plain else contextlib.nullcontext
    # The optimizer may hold others, too, such as those of the loss.
    groups = getattr(optimizer, "param_groups", ())
    others = {parameter for group in groups for parameter in group["params"]} - set(plain.parameters())
    with _kept_buffers(plain), _kept_gradients(others):
        try:
            for _ in range(2 + steps):
                model.zero_grad(set_to_none=True)
                with syncs_off():
                    recorder.run(forward)
            job = recorder.job(name or type(plain).__name__, _default_codecs(codecs), skipped=2)
        finally:
            recorder.remove()
        if optimizer is not None:
            parameters = [*(parameter for _, parameter in named), *others]
            with _kept_parameters(parameters), _kept_state(optimizer):
                job["optimizer_ns"] = _time_optimizer(parameters, optimizer, steps)
    model.zero_grad(set_to_none=True)
    return Job(job)


def _refuse_what_takes_part(module, parameters):
    """Backward passes on this rank alone would end its exchange, or go into its next step."""
    holder = holder_of(parameters)
    if isinstance(holder, Reducer):
        raise SpecError("a cortado.Reducer averages the gradients of this model: profile it before, or close() that")
    if has_kfac(module):
        raise SpecError("a cortado.KFAC is on this model, whose factors these passes would go into: profile it before")


# What is between these is afterwards as before.


@contextlib.contextmanager
def _kept_buffers(module):
    places = [(part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    before = [(*place, None if place[2] is None else place[2].clone()) for place in places]
    try:
        yield
    finally:
        for buffers, name, buffer, values in before:
            buffers[name] = buffer
            if buffer is not None and not torch.equal(buffer, values):
                buffer.copy_(values)


@contextlib.contextmanager
def _kept_parameters(parameters):
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)


@contextlib.contextmanager
def _kept_gradients(parameters):
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextlib.contextmanager
def _kept_state(optimizer):
    """It works on copies. Of what is no torch.optim.Optimizer nothing is known."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield
        return
    state, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    optimizer.state.update((parameter, copy.deepcopy(held)) for parameter, held in state.items())
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)


def _default_codecs(codecs):
    if codecs is None:
        return _core.auto_codecs()
    return [codecs] if isinstance(codecs, str) else list(codecs)


def _forward_of(model, batch, loss):
    def scalar(output):
        value = loss(output) if loss is not None else getattr(output, "loss", output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise SpecError(f"profile needs a scalar loss to run backward from, got {found}: say loss=")
        return value

    if callable(batch) and not isinstance(batch, torch.Tensor):
        return lambda: scalar(batch())
    if isinstance(batch, Mapping):
        return lambda: scalar(model(**batch))
    if isinstance(batch, (tuple, list)):
        return lambda: scalar(model(*batch))
    return lambda: scalar(model(batch))


class _Recorder:
    """When each gradient is complete, from the start of the backward pass."""

    def __init__(self, named):
        self._named = named
        self._device = named[0][1].device
        self._ready = []  # of each step: when the gradients were complete that came
        self._forwards, self._backwards = [], []
        self._start_ns = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: self._note(key)) for key, parameter in named
        ]

    def _now_ns(self):
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()

    def _note(self, key):
        is_early = self._start_ns is None  # in a backward pass that forward() makes
        self._ready[-1][key] = 0 if is_early else self._now_ns() - self._start_ns  # of parts, the last

    def run(self, forward):
        begin_ns = self._now_ns()
        self._ready.append({})
        self._start_ns = None
        value = forward()
        self._start_ns = self._now_ns()
        value.backward()
        end_ns = self._now_ns()
        self._forwards.append(self._start_ns - begin_ns)
        self._backwards.append(end_ns - self._start_ns)

    def remove(self):
        for hook in self._hooks:
            hook.remove()

    def job(self, name, codecs, skipped):
        backward_ns = int(statistics.median(self._backwards[skipped:]))
        tensors = []
        for key, parameter in self._named:
            # Never ready: not used in this step. It travels all the same, at the end.
            times = [ready[key] for ready in self._ready[skipped:] if key in ready]
            ready_ns = min(backward_ns, int(statistics.median(times))) if times else backward_ns
            tensors.append(self._tensor(key, parameter, ready_ns, codecs))
        tensors.sort(key=lambda tensor: tensor["ready_ns"])
        return {
            "format": "cortado.job/1",
            "name": name,
            "description": "measured by cortado.profile",
            "device": "gpu" if self._device.type == "cuda" else "cpu",
            "forward_ns": int(statistics.median(self._forwards[skipped:])),
            "backward_ns": backward_ns,
            "optimizer_ns": None,
            "tensors": tensors,
        }

    @staticmethod
    def _tensor(key, parameter, ready_ns, codecs):
        if parameter.dtype not in _DTYPES:
            raise SpecError(f'parameter "{key}" has dtype {parameter.dtype}; expected one of {list(_DTYPES.values())}')
        tensor = {
            "name": key,
            "shape": list(parameter.shape),
            "dtype": _DTYPES[parameter.dtype],
            "ready_ns": ready_ns,
        }
        if parameter.grad is None or parameter.numel() == 0:  # not used: nothing of it is lost
            return {**tensor, "rms": 0.0}
        gradient = parameter.grad.detach().float().cpu().contiguous()
        tensor["rms"] = gradient.square().mean().sqrt().item()
        matrix = gradient.reshape(gradient.shape[0], -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
        errors = {spec: _core.relative_error(spec, matrix.numpy()) for spec in codecs}
        tensor["errors"] = {spec: error for spec, error in errors.items() if math.isfinite(error)}  # fp16 may overflow
        if not tensor["errors"]:
            del tensor["errors"]
        return tensor


def _time_optimizer(parameters, optimizer, steps):
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    times = []
    for _ in range(1 + steps):
        if parameters[0].device.type == "cuda":
            torch.cuda.synchronize()
        start_ns = time.perf_counter_ns()
        optimizer.step()
        if parameters[0].device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start_ns)
    return int(statistics.median(times[1:]))
