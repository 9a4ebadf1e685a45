# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Cortado makes data-parallel training fast on slow networks.

    model = DistributedDataParallel(net)
    cortado.attach(model)                    # before the first backward; measures, decides and watches by itself
    cortado.attach(model, "acp(rank=4)")     # or say how
    # or cortado.lightning.GradientCompression(), cortado.accelerate.attach(), cortado.transformers.attach()
    ...
    print(cortado.report(model))             # bytes, ratio and error, time by stage, what was not compressed and why

    reducer = cortado.Reducer(net, "acp(rank=4)")   # the same without DDP: backward(), reducer.wait(), step()

    kfac = cortado.KFAC(model, compression="compso(bound=4e-3)")
    ...
    kfac.step()                              # between loss.backward() and optimizer.step()

    data = cortado.compress(array, "sign")   # one NumPy array or torch tensor as bytes, to keep or to send
    array = cortado.decompress(data)

Importing cortado needs nothing but Python; attach, ddp_hook, Reducer, report, calibrate, profile, KFAC and gathers need
torch, decompress NumPy or torch.
"""

import importlib
import re

from ._core import __version__, canonical_spec
from .codec_file import compress, decompress
from .errors import CortadoError, MismatchError, PeerError, SpecError
from .plan import Plan
from .profiles import Cluster, Job
from .trace import Trace, load_trace

__all__ = [
    "KFAC",
    "Cluster",
    "CompressedAllGather",
    "CortadoError",
    "Job",
    "MismatchError",
    "PeerError",
    "Plan",
    "Reducer",
    "SpecError",
    "Trace",
    "__version__",
    "attach",
    "calibrate",
    "canonical_spec",
    "compress",
    "compressed_all_gather",
    "ddp_hook",
    "decompress",
    "load_trace",
    "profile",
    "report",
    "smooth_schedule",
    "step_schedule",
]

# What needs torch, and where it is.
_LAZY = {
    **dict.fromkeys(("attach", "ddp_hook", "report"), "ddp"),
    "Reducer": "reducer",
    "calibrate": "calibration",
    "profile": "profiling",
    "KFAC": "kfac",
    **dict.fromkeys(("smooth_schedule", "step_schedule"), "kfac_schedules"),
    **dict.fromkeys(("CompressedAllGather", "compressed_all_gather"), "owner_gather"),
}

# Modules; they, or who uses them, need the package of their name.
_FRAMEWORKS = ("accelerate", "lightning", "transformers")


def _need_torch(what):
    needs = f"{what} needs PyTorch 2.11 or later with torch.distributed, and NumPy"
    try:
        import torch.distributed

        importlib.import_module("numpy")  # torch does without, but not what hands its tensors to the library
    except ImportError as error:
        raise CortadoError(f"{needs}; importing them failed: {error}", "unsupported") from error
    if [int(number) for number in re.findall(r"\d+", torch.__version__)[:2]] < [2, 11]:  # 2.11.0a0 has what 2.11 has
        raise CortadoError(f"{needs}; this is PyTorch {torch.__version__}", "unsupported")


def __getattr__(name):
    if name in _LAZY:
        _need_torch(f"cortado.{name}")
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name in _FRAMEWORKS:
        _need_torch(f"cortado.{name}")
        try:
            return importlib.import_module(f".{name}", __name__)
        except ImportError as error:
            needs = f"cortado.{name} needs the package {name} (pip install {name}); importing it failed: {error}"
            raise CortadoError(needs, "unsupported") from error
    raise AttributeError(f"module 'cortado' has no attribute {name!r}")
