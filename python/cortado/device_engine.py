# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Whether gradients on a CUDA device are compressed there, or copied to the engine and back (docs/adr/0032, 0031); and
the libraries that do anything there."""

import os
from dataclasses import dataclass
from pathlib import Path

from . import _core
from .errors import CortadoError
from .side_stream import ComputeStream

LIBRARY = "libcortado_cuda.so"  # beside _core, where it was built with nvcc
VARIABLE = "CORTADO_CUDA_LIBRARY"  # or where this says
_CODECS = ("acp", "power", "sign", "quant", "fp8", "topk", "randk", "compso", "float_rans")


@dataclass(frozen=True)
class Place:
    """Where the engine is, or K-FAC. ``library``: of the one on the device. ``reason``: why on the CPU though gradients
    are on a device. ``schemes``: of what encodes there what a plan gives to the GPU, for an engine on the CPU;
    ``why_no_schemes``: why there is none."""

    library: str | None = None
    reason: str = ""
    schemes: str | None = None
    why_no_schemes: str = ""


def place_of_engine(device, what):
    """For parameters on ``device`` and ``what``, the text that the engine is given (spec.text_for_engine)."""
    if device.type != "cuda":
        return Place()
    if what.startswith("{"):
        return _place_of_plan()
    reason = _refusal(what)
    if reason:
        return Place(reason=reason)
    return find_library(LIBRARY, VARIABLE)


def find_library(name, variable):
    """The place of what is loaded from the library ``name``, or from the path in the environment's ``variable``."""
    path = os.environ.get(variable) or str(Path(_core.__file__).parent / name)
    if not os.path.exists(path):
        return Place(
            reason=f"there is no {path}: build with CORTADO_BUILD_CUDA=ON where nvcc is "
            f"(and for K-FAC cuSOLVER and cuBLAS), or say where it is with {variable}"
        )
    try:
        count = _core.device_count(path)
    except CortadoError as error:
        return Place(reason=str(error))
    if count == 0:
        return Place(reason=f"{path} finds no device")
    return Place(library=path)


def _place_of_plan():
    found = find_library(LIBRARY, VARIABLE)
    return Place(reason="a plan's sums are made on the host", schemes=found.library, why_no_schemes=found.reason)


def _refusal(what):
    codec = what.partition("(")[0].strip()
    if codec == "auto":
        return ""
    if codec not in _CODECS or "|" in what:
        return f"{', '.join(_CODECS)} are compressed on a device, {codec if codec not in _CODECS else what} is not"
    if codec in ("acp", "power") and "rollback=exact" in what:
        return f"rollback=exact of {codec}"
    return ""


def compute_stream_of(device):
    return ComputeStream(device)
