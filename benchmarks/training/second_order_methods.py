# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Methods of `second_order.py` by name.

| name | what it is |
|---|---|
| `sgd`, `adam` | first order |
| `kfac` | cortado.KFAC, uncompressed: preconditioned gradients in one message a rank |
| `kfac + CODEC` | the same, preconditioned gradients compressed |
| `kfac + CODEC to step N, CODEC` | with the first codec until step N, then with the second |
| `... + feedback` | with owner-side error feedback |
| `... + factors CODEC` | factors and eigenvectors compressed |
| `kfac + broadcasts` | `kfac`, but a broadcast for each layer, as kfac-pytorch sends them |
| `kfac-pytorch` | kfac-pytorch itself, from a checkout |
| `kfac-pytorch + CODEC` | the same, over the communicator of examples/kfac_pytorch_communicator.py |
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

KFAC, KFAC_PYTORCH = "kfac", "kfac-pytorch"
HOSTS = ("sgd", "adam", KFAC, KFAC_PYTORCH)
_FACTORS = "factors "
_SCHEDULE = re.compile(r"(?P<first>.+) to step (?P<last>\d+), (?P<later>.+)")


@dataclass(frozen=True)
class SecondOrderMethod:
    host: str
    codec: str = "none"
    factor_codec: str = "none"
    feedback: bool = False
    broadcasts: bool = False

    def compression(self) -> str | Callable[[int], str]:
        """For cortado.KFAC: the codec, or the one of a step."""
        schedule = _SCHEDULE.fullmatch(self.codec)
        if schedule is None:
            return self.codec
        last, first, later = int(schedule["last"]), schedule["first"], schedule["later"]
        return lambda step: first if step < last else later


def parse_method(name: str) -> SecondOrderMethod:
    host, *parts = (part.strip() for part in name.split(" + "))
    if host not in HOSTS or (parts and host not in (KFAC, KFAC_PYTORCH)):
        raise ValueError(f"method {name!r}: expected one of {', '.join(HOSTS)}, K-FAC with ` + CODEC` and so on")
    factors = [part.removeprefix(_FACTORS).strip() for part in parts if part.startswith(_FACTORS)]
    codecs = [p for p in parts if p not in ("feedback", "broadcasts") and not p.startswith(_FACTORS)]
    if len(codecs) > 1 or len(factors) > 1 or ("broadcasts" in parts and (codecs or host != KFAC)):
        raise ValueError(f"method {name!r}: expected at most one codec of each kind, and none with broadcasts")
    return SecondOrderMethod(
        host,
        codec=codecs[0] if codecs else "none",
        factor_codec=factors[0] if factors else "none",
        feedback="feedback" in parts,
        broadcasts="broadcasts" in parts,
    )
