# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Options of KFAC as kfac-pytorch spells them: names, members of its enumerations, and what has no effect here."""

import numbers
import warnings

import torch
from torch.amp.grad_scaler import OptState

from .errors import SpecError

_STRATEGIES = {"comm-opt": "COMM-OPT", "hybrid-opt": "HYBRID-OPT", "mem-opt": "MEM-OPT", "dp-kfac": "DP-KFAC"}

HYPERPARAMETERS = ("factor_update_steps", "inv_update_steps", "damping", "factor_decay", "kl_clip", "lr")

# The value that says what happens anyway, and why others change nothing.
_IN_FP32 = "is kept in float32 (factor_compression= is for what travels)"
_WITHOUT_EFFECT = {
    "accumulation_steps": (1, "every micro-batch since the last step() counts, however many there were"),
    "allreduce_bucket_cap_mb": (None, "the factors of all layers are one message"),
    "compute_eigenvalue_outer_product": (False, "eigenvalues are kept, so that damping takes effect at once"),
    "symmetry_aware": (True, "symmetric matrices always travel as triangles"),
    "update_factors_in_hook": (False, "step() sums what hooks have added up over the ranks"),
    "factor_dtype": (torch.float32, f"what is computed of a batch {_IN_FP32}"),
    "inv_dtype": (torch.float32, f"what is computed of factors {_IN_FP32}"),
}


def without_effect(given):
    """A warning about options of kfac-pytorch that change nothing here, or an empty text.

    given: values by name; None is not given. Values that kfac-pytorch refuses too, and those asking for more than there
    is, are a SpecError.
    """
    for name, least in (("accumulation_steps", 1), ("allreduce_bucket_cap_mb", 0)):
        value = given[name]
        if value is not None and not (isinstance(value, numbers.Real) and value >= least):
            raise SpecError(f"{name} must be at least {least}, got {value!r}")
    for name in ("factor_dtype", "inv_dtype"):
        if given[name] not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise SpecError(f"{name} can't be {given[name]}: factors and inverses are kept in torch.float32")
    return "\n".join(
        f"{name}={given[name]} has no effect because {why}"
        for name, (same, why) in _WITHOUT_EFFECT.items()
        if given[name] is not None and given[name] != same
    )


def counted(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


def warn(text):
    warnings.warn(f"cortado.KFAC: {text}", stacklevel=3)


def check_types(kind, **given):
    """SpecError where one of the options is no ``kind``: bool, int (of at least 0) or float (above 0)."""
    said = {bool: "True or False", int: "a whole number of at least 0", float: "a number above 0"}[kind]
    for name, value in given.items():
        is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
        is_right = isinstance(value, bool) if kind is bool else is_number and (value >= 0 if kind is int else value > 0)
        if kind is int and is_right and value >= 2**63:
            raise SpecError(f"{name} must be below 2^63, got {value}")
        if not is_right:
            raise SpecError(f"{name} must be {said}, got {value!r}")


def hyperparameter(name, value):
    """The number that a hyper-parameter is, of this step if it is a function; the core knows which are allowed."""
    if value is None and name == "kl_clip":
        return 0.0  # off
    is_number = value is not None and not isinstance(value, str | bool) and hasattr(value, "__float__")
    if name.endswith("_steps"):
        if not is_number or not 1 <= value < 2**63 or int(value) != value:
            raise SpecError(f"{name} must be a whole number of at least 1, got {value!r}")
        return int(value)
    if not is_number:
        raise SpecError(f"{name} must be a number, or a function of the step that gives one, got {value!r}")
    return float(value)


def one_of(name, value, known):
    """The known name that is meant, in any case, or by a member of an enumeration."""
    spelled = _name_of(value)
    if spelled not in known:
        raise SpecError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return spelled


def scale_function(grad_scaler):
    """What gives the scale of the loss: get_scale() of a scaler, or the function itself; None for None."""
    function = getattr(grad_scaler, "get_scale", grad_scaler)
    if function is not None and not callable(function):
        raise SpecError(f"grad_scaler must have get_scale() or be a function of nothing, got {grad_scaler!r}")
    return function


def skips_steps(grad_scaler):
    """Whether it is a GradScaler (or its get_scale) that leaves out an optimizer step after an overflow on its rank."""
    scaler = getattr(grad_scaler, "__self__", grad_scaler)
    return isinstance(scaler, torch.amp.GradScaler) and not _tells_all_ranks(scaler) and scaler.is_enabled()


def is_scaled_still(grad_scaler):
    """Whether it is a GradScaler (or its get_scale) whose unscale_() has not been called for an optimizer, of a scale
    other than 1."""
    scaler = getattr(grad_scaler, "__self__", grad_scaler)
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled() or scaler.get_scale() == 1:
        return False
    stages = getattr(scaler, "_per_optimizer_states", {}).values()
    return not any(state["stage"] is OptState.UNSCALED for state in stages)


def _tells_all_ranks(scaler):
    return any(base.__name__ == "ShardedGradScaler" for base in type(scaler).__mro__)


def choose_strategy(strategy, fraction, world_size, compresses):
    """(name, gradient workers of a layer, why)"""
    if strategy is None and hasattr(fraction, "name"):  # DistributedStrategy.HYBRID_OPT means half
        strategy = fraction
        fraction = 0.5 if _name_of(strategy) == "hybrid-opt" else None
    if strategy is not None:
        strategy = one_of("strategy", strategy, tuple(_STRATEGIES))
    if strategy is None and fraction is None:
        if compresses:
            return "MEM-OPT", 1, "the default with compression"
        return "COMM-OPT", world_size, "the default"
    if strategy == "hybrid-opt" and fraction is None:
        raise SpecError("hybrid-opt needs grad_worker_fraction, such as 0.5")
    if strategy in ("comm-opt", "mem-opt", "dp-kfac") and fraction is not None:
        raise SpecError(f"{strategy} says what grad_worker_fraction says; give one of them")
    if strategy not in (None, "hybrid-opt"):
        return _STRATEGIES[strategy], world_size if strategy == "comm-opt" else 1, "asked for"
    is_number = isinstance(fraction, numbers.Real)
    workers = max(1, round(world_size * fraction)) if is_number and 0 <= fraction <= 1 else 0
    if workers == 0 or world_size % workers or (abs(workers - world_size * fraction) > 1e-6 and workers > 1):
        raise SpecError(
            f"grad_worker_fraction must be from 0 (one rank) to 1 and give a divisor of the world size {world_size}, "
            f"got {fraction!r}"
        )
    name = "COMM-OPT" if workers == world_size else "MEM-OPT" if workers == 1 else "HYBRID-OPT"
    return name, workers, f"grad_worker_fraction={fraction:g}"


def _name_of(value):
    return str(getattr(value, "name", value)).lower().replace("_", "-")
