# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Cortado makes data-parallel training fast on slow networks.

    model = DistributedDataParallel(net)
    cortado.attach(model, "acp(rank=4)")     # before the first backward
    ...
    print(cortado.report(model))             # bytes, ratio and error, time by stage, what was not compressed and why

    reducer = cortado.Reducer(net, "acp(rank=4)")   # the same without DDP: backward(), reducer.wait(), step()

    data = cortado.compress(array, "sign")   # one NumPy array or torch tensor as bytes, to keep or to send
    array = cortado.decompress(data)

Importing cortado needs nothing but Python; attach, ddp_hook, Reducer and report need torch, decompress NumPy or torch.
"""

from ._core import __version__, canonical_spec
from .codec_file import compress, decompress
from .errors import CortadoError, MismatchError, PeerError, SpecError
from .trace import Trace, load_trace

__all__ = [
    "CortadoError",
    "MismatchError",
    "PeerError",
    "Reducer",
    "SpecError",
    "Trace",
    "__version__",
    "attach",
    "canonical_spec",
    "compress",
    "ddp_hook",
    "decompress",
    "load_trace",
    "report",
]


def __getattr__(name):
    if name in ("Reducer", "attach", "ddp_hook", "report"):
        try:
            import torch.distributed  # noqa: F401
        except ImportError as error:
            raise CortadoError(
                f"cortado.{name} needs PyTorch 2.11 or later with torch.distributed, and importing it failed: {error}"
            ) from error
        from . import ddp, reducer

        return reducer.Reducer if name == "Reducer" else getattr(ddp, name)
    raise AttributeError(f"module 'cortado' has no attribute {name!r}")
