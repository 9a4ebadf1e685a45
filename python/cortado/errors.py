# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The exceptions of cortado. Every error of the C++ library becomes one; ``code`` is its word for the kind of error."""

import copy


class CortadoError(RuntimeError):
    """Anything that went wrong in cortado."""

    _CODE = "failed precondition"  # what Python finds; the library says its own

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = code or self._CODE


class SpecError(CortadoError, ValueError):
    """A codec string, option or argument is wrong or not supported; nothing was changed."""

    _CODE = "invalid argument"


class MismatchError(CortadoError):
    """Ranks, models or saved states differ."""

    _CODE = "mismatch"


class PeerError(CortadoError):
    """Another rank is gone, failed or did not answer in time."""

    _CODE = "peer failed"


_CLASSES = {
    "invalid argument": SpecError,
    "not found": SpecError,
    "unsupported": SpecError,
    "mismatch": MismatchError,
    "timeout": PeerError,
    "peer failed": PeerError,
}


def without_frames(error):
    """A copy of an error to keep: of the same class, with the same text, but none of the frames it went through, which
    hold all that their functions do."""
    try:
        kept = copy.copy(error)
    except Exception:  # a class that is made of other things than what it says
        kept = CortadoError(f"{type(error).__name__}: {error}")
    kept.__traceback__ = kept.__context__ = kept.__cause__ = None
    return kept


def sendable(text):
    """A text as other ranks and the library take it: what has no UTF-8, as bytes of a path that could not be decoded,
    is escaped."""
    return text.encode(errors="backslashreplace").decode()


def raise_status(code, message):
    """Called by the C++ module to raise what a Status says."""
    raise _CLASSES.get(code, CortadoError)(message, code)
