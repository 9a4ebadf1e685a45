# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Ways for gradients to travel, by name: PyTorch's, the limit, and every Cortado codec string.

| name | what it is |
|---|---|
| `no-communication` | the step under `no_sync`: the limit, no training method |
| `empty-hook` | DDP with a hook that sends nothing: what its buckets take by themselves, no training method |
| `ddp` | DDP's own fp32 all-reduce |
| `bf16`, `fp16` | a hook that casts, all-reduces and copies back |
| `powersgd(rank=4)` | PyTorch's PowerSGD hook, in one bucket |
| `powersgd-batched(rank=4)` | the same with batch_tensors_with_same_shape |
| `torch-acp(rank=4)` | plain ACP-SGD in PyTorch operations |
| `ddp-tuned` | `ddp` with the fastest of several bucket sizes; `speed.py` only |
| anything else | a codec string for `cortado.attach` |

` @ 4` after a name sets DDP's `bucket_cap_mb` to 4 MiB. ` via all_gather` after a codec string makes a plan of it:
buckets of 25 MiB that are encoded, exchanged by that collective among all ranks, and decoded; `via all_reduce` sums
what is encoded. ` in a loop` after a codec string: by `cortado.Reducer`, without DDP. ` + checks` last: with checked
collectives (attach's check_collectives). The parsing needs no torch.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass

NO_COMMUNICATION = "no-communication"
EMPTY_HOOK = "empty-hook"
TUNED = "ddp-tuned"
BASELINES = (NO_COMMUNICATION, EMPTY_HOOK, "ddp", "bf16", "fp16", "powersgd", "powersgd-batched", "torch-acp", TUNED)
CHECKS = " + checks"
IN_A_LOOP = " in a loop"
ONE_BUCKET_MIB = 4096
PLAN_BUCKET_BYTES = 25 * 2**20
DDP_FLAGS = {"gradient_as_bucket_view": True, "init_sync": False}


@dataclass(frozen=True)
class Method:
    """A parsed name. `codec` is the part before the parenthesis, `rank` its low-rank dimension."""

    name: str
    codec: str
    rank: int
    bucket_cap_mib: float | None  # None: DDP's default
    via: str = ""  # a collective: the codec's payloads travel as a plan says
    checks: bool = False  # of what collectives deliver
    in_a_loop: bool = False  # by a Reducer

    @property
    def is_baseline(self) -> bool:
        return self.codec in BASELINES

    @property
    def communicates(self) -> bool:
        return self.codec not in (NO_COMMUNICATION, EMPTY_HOOK)


def parse_method(name: str) -> Method:
    unchecked = name.removesuffix(CHECKS)
    checks, name = unchecked != name, unchecked
    of_ddp = name.removesuffix(IN_A_LOOP)
    in_a_loop, name = of_ddp != name, of_ddp
    name, _, via = (part.strip() for part in name.partition(" via "))
    if via not in ("", "all_gather", "all_reduce"):
        raise ValueError(f"method {name!r} via {via!r}: expected all_gather or all_reduce")
    spec, _, cap = (part.strip() for part in name.partition("@"))
    codec = spec.partition("(")[0].strip()
    rank = re.search(r"\brank\s*=\s*(\d+)", spec)
    baseline_form = re.fullmatch(r"[\w-]+(\(rank=[1-9]\d*\))?", spec)
    if not codec or (codec in BASELINES and not baseline_form):
        raise ValueError(f"method {name!r}: expected for example powersgd(rank=4) or acp(rank=4)")
    cap_mib = float(cap) if cap else ONE_BUCKET_MIB if codec.startswith("powersgd") else None
    if checks and codec in BASELINES:
        raise ValueError(f"method {name!r} with checks: only Cortado's collectives can be checked")
    if in_a_loop and (codec in BASELINES or via or cap):
        raise ValueError(f"method {name!r} in a loop: expected a codec string alone, for cortado.Reducer")
    return Method(spec, codec, int(rank[1]) if rank else 4, cap_mib, via, checks, in_a_loop)


def require_cortado(names: list[str]) -> None:
    """Fails early, before anything is started, where a method needs Cortado and it is missing, or has no such codec."""
    ours = [name for name in names if not parse_method(name).is_baseline]
    if not ours:
        return
    try:
        import cortado
    except ImportError as error:
        raise SystemExit(f"{ours[0]} needs the cortado module: {error} (make setup)") from error
    for name in ours:
        try:
            cortado.canonical_spec(parse_method(name).name)
        except cortado.SpecError as error:
            raise SystemExit(f"method {name!r}: {error}") from None


@dataclass
class Wrapped:
    """A model whose gradients travel by `method`."""

    ddp: object  # under DDP, or the model itself if a Reducer averages its gradients
    method: Method
    state: object  # the hook's state, or the Reducer; None for plain DDP

    @property
    def module(self):
        """The model itself."""
        return self.ddp if self.method.in_a_loop else self.ddp.module

    def step_context(self):
        """Around forward and backward."""
        return self.ddp.no_sync() if self.method.codec == NO_COMMUNICATION else contextlib.nullcontext()

    def end_backward(self) -> None:
        """After it: gradients are the means then."""
        if self.method.in_a_loop:
            self.state.wait()

    def set_probe(self, on: bool) -> None:
        """Makes the baselines measure their error in the steps that follow, at the cost of time."""
        if hasattr(self.state, "probe"):
            self.state.probe = on

    def payload_bytes(self) -> int:
        """What one rank handed to the collectives in the last step."""
        return _PAYLOAD.get(self.method.codec, _cortado_payload)(self)

    def relative_error(self) -> float:
        """L2 norm of what was held back over that of what was to be sent (gradient + residual)."""
        return _ERROR.get(self.method.codec, _cortado_error)(self)

    def report_details(self) -> dict:
        """Cortado's own account of its time and memory; empty for the baselines."""
        if self.method.is_baseline:
            return {}
        keys = ("steps", "messages_per_step", "hook_ns", "time_by_stage_ns", "memory_bytes")
        report = _cortado_report(self)
        return {key: report[key] for key in keys if key in report}


def wrap(model, name: str) -> Wrapped:
    """Puts a model under DDP with the method's hook. Equal initial weights are the caller's."""
    from torch.nn.parallel import DistributedDataParallel

    method = parse_method(name)
    if method.in_a_loop:
        import cortado

        return Wrapped(model, method, cortado.Reducer(model, method.name, check_collectives=method.checks))
    flags = dict(DDP_FLAGS)
    if method.bucket_cap_mib is not None:
        flags["bucket_cap_mb"] = method.bucket_cap_mib
    ddp = DistributedDataParallel(model, **flags)
    return Wrapped(ddp, method, _attach(ddp, method))


def _attach(ddp, method: Method):
    import baselines
    import torch

    if method.codec in (NO_COMMUNICATION, "ddp"):
        return None
    if not method.is_baseline:
        import cortado

        plan = _plan_of(ddp, method) if method.via else method.name
        return cortado.attach(ddp, plan, check_collectives=method.checks)
    state, hook = {
        EMPTY_HOOK: lambda: (None, baselines.empty_hook),
        "bf16": lambda: (baselines.CastState(torch.bfloat16), baselines.cast_hook),
        "fp16": lambda: (baselines.CastState(torch.float16), baselines.cast_hook),
        "powersgd": lambda: (baselines.PowerState(method.rank), baselines.power_hook),
        "powersgd-batched": lambda: (baselines.PowerState(method.rank, batched=True), baselines.power_hook),
        "torch-acp": lambda: (baselines.TorchAcpState(method.rank), baselines.torch_acp_hook),
    }[method.codec]()
    ddp.register_comm_hook(state, hook)
    return state


def _plan_of(ddp, method: Method) -> dict:
    """Buckets of the last parameters first, as the backward pass has them."""
    import torch.distributed as dist

    buckets, bucket_bytes = [], 0
    for name, parameter in reversed(list(ddp.module.named_parameters())):
        if not buckets or bucket_bytes + 4 * parameter.numel() > PLAN_BUCKET_BYTES:
            buckets.append([])
            bucket_bytes = 0
        buckets[-1].append(name)
        bucket_bytes += 4 * parameter.numel()
    option = [
        {"op": "encode", "device": "cpu"},
        {"op": method.via, "levels": ["all"]},
        {"op": "decode", "device": "cpu"},
    ]
    return {
        "format": "cortado.plan/1",
        "levels": [{"name": "all", "ranks": dist.get_world_size()}],
        "buckets": [{"tensors": names, "codec": method.name, "option": option} for names in buckets],
    }


def _elems(wrapped: Wrapped) -> int:
    return sum(parameter.numel() for parameter in wrapped.ddp.parameters())


def _power_payload(wrapped: Wrapped) -> int:
    elems = 0
    for parameter in wrapped.ddp.parameters():
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        factors = (rows + columns) * min(wrapped.method.rank, rows, columns)
        elems += min(factors, parameter.numel())
    return 4 * elems


def _cortado_report(wrapped: Wrapped) -> dict:
    import cortado

    return cortado.report(wrapped.state).to_dict()


def _cortado_payload(wrapped: Wrapped) -> int:
    return _cortado_report(wrapped)["bytes_per_step"]


def _cortado_error(wrapped: Wrapped) -> float:
    return _cortado_report(wrapped)["relative_error"]


_PAYLOAD: dict[str, Callable[[Wrapped], int]] = {
    NO_COMMUNICATION: lambda wrapped: 0,
    EMPTY_HOOK: lambda wrapped: 0,
    "ddp": lambda wrapped: 4 * _elems(wrapped),
    "bf16": lambda wrapped: 2 * _elems(wrapped),
    "fp16": lambda wrapped: 2 * _elems(wrapped),
    "powersgd": _power_payload,
    "powersgd-batched": _power_payload,
    "torch-acp": lambda wrapped: 4 * wrapped.state.last_payload_elems,
}
_ERROR: dict[str, Callable[[Wrapped], float]] = {
    NO_COMMUNICATION: lambda wrapped: 0.0,
    EMPTY_HOOK: lambda wrapped: 0.0,
    "ddp": lambda wrapped: 0.0,
    "bf16": lambda wrapped: wrapped.state.relative_error,
    "fp16": lambda wrapped: wrapped.state.relative_error,
    "powersgd": lambda wrapped: wrapped.state.relative_error,
    "powersgd-batched": lambda wrapped: wrapped.state.relative_error,
    "torch-acp": lambda wrapped: wrapped.state.relative_error,
}
