# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""One tensor as the bytes of a codec file, which the program `cortado codec` reads too (docs/wire_format.md)."""

from . import _core
from .errors import SpecError
from .spec import spec_from


def compress(tensor, spec, *, seed=0, chunk_elems=0):
    """Returns ``tensor`` compressed by the codec ``spec`` names ("sign", "acp(rank=4)" ...) as bytes.

    ``tensor`` is a NumPy array or torch tensor (or anything with DLPack or the buffer protocol) of float32, float16,
    bfloat16 or uint8. It is encoded as a matrix: the first dimension is the rows. ``seed`` is for codecs that draw
    random numbers. Tensors of more than ``chunk_elems`` elements are cut into chunks that are encoded by themselves;
    0 stands for about 2**26.
    """
    if hasattr(tensor, "detach"):  # torch: DLPack refuses what requires a gradient, the encoder what is on a device
        tensor = tensor.detach().cpu()
    try:
        return _core.compress(tensor, spec_from(spec), seed, chunk_elems)
    except TypeError:
        what = f"{type(tensor).__name__} of dtype {getattr(tensor, 'dtype', None)}"
        raise SpecError(f"compress takes an array of float32, float16, bfloat16 or uint8, got {what}") from None


def decompress(data, *, framework="numpy"):
    """Returns the array in ``data``, the bytes that :func:`compress` or `cortado codec compress` made.

    ``framework`` is "numpy" or "torch"; bfloat16 tensors need torch. Raises CortadoError if ``data`` is damaged.
    """
    if framework not in ("numpy", "torch"):
        raise SpecError(f'framework must be "numpy" or "torch", got {framework!r}')
    return _core.decompress(data, framework == "torch")
