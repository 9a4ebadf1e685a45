# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Bounds of COMPSO over the steps of a training, for K-FAC's ``compression``."""

import math

import torch

from . import _core
from .errors import SpecError
from .kfac_options import check_types
from .spec import spec_from


def _with_bound(codec, bound, is_filtered):
    """``codec`` with this bound; a wrong one is an error now, not in the stage that it is for."""
    spec = spec_from({"codec": spec_from(codec), "bound": f"{bound:g}", **({} if is_filtered else {"filter": "off"})})
    _core.canonical_spec(spec)
    return spec


def step_schedule(first, later, lr, *, codec="compso", from_step=0):
    """``compression`` with the bound ``first`` until the learning rate falls, then ``later`` without a filter.

    lr: the function of the step that gives the learning rate, or the optimizer: the rate of its first group, which has
        fallen when it is below the initial one (``initial_lr``, which torch's schedulers set; without one, what it is
        now); that it rises again changes nothing. from_step: when its warm-up ends. codec: may have options of
        its own ("compso(coder=none)").
    """
    is_optimizer = isinstance(lr, torch.optim.Optimizer)
    if not is_optimizer and not callable(lr):
        raise SpecError(f"step_schedule expects a function of the step or an optimizer as lr, got {lr!r}")
    if not later <= first:
        raise SpecError(f"step_schedule expects a later bound of at most the first, got {later} after {first}")
    rate_now = lr.param_groups[0]["lr"] if is_optimizer else None
    looked_until, fell_at = from_step, math.inf

    def fell_by(step):
        nonlocal looked_until, fell_at
        if is_optimizer:
            group = lr.param_groups[0]
            if step > from_step and group["lr"] < group.get("initial_lr", rate_now):
                fell_at = min(fell_at, step)
        while not is_optimizer and looked_until < step and fell_at == math.inf:
            looked_until += 1
            if lr(looked_until) < lr(from_step):
                fell_at = looked_until
        return fell_at <= step

    specs = _with_bound(codec, first, is_filtered=True), _with_bound(codec, later, is_filtered=False)
    return lambda step: specs[fell_by(step)]


def smooth_schedule(first, factor, stages, total_steps, *, unfiltered_stages=1, codec="compso"):
    """``compression`` in equal stages with the bounds first, first * factor, ...; no filter in the last ones.

    No bound is below 1e-4. codec: may have options of its own ("compso(coder=none)").
    """
    check_types(int, stages=stages, total_steps=total_steps, unfiltered_stages=unfiltered_stages)
    if not 0 < factor < 1 or stages < 1 or total_steps < stages or unfiltered_stages > stages:
        raise SpecError(
            "smooth_schedule expects a factor between 0 and 1, at most one stage a step and at most all without "
            f"a filter, got factor={factor}, stages={stages}, total_steps={total_steps}, "
            f"unfiltered_stages={unfiltered_stages}"
        )

    specs = [
        _with_bound(codec, max(first * factor**stage, 1e-4), is_filtered=stage < stages - unfiltered_stages)
        for stage in range(stages)
    ]
    return lambda step: specs[min(step * stages // total_steps, stages - 1)]
