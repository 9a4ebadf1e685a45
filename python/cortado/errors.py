# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The exceptions of cortado. Every error of the C++ library becomes one; ``code`` is the library's word for it."""


class CortadoError(RuntimeError):
    """Anything that went wrong in cortado."""

    def __init__(self, message, code="internal error"):
        super().__init__(message)
        self.code = code


class SpecError(CortadoError, ValueError):
    """A codec string, option or argument is wrong or not supported; nothing was changed."""


class MismatchError(CortadoError):
    """Ranks, models or saved states differ."""


class PeerError(CortadoError):
    """Another rank is gone, failed or did not answer in time."""


_CLASSES = {
    "invalid argument": SpecError,
    "not found": SpecError,
    "unsupported": SpecError,
    "mismatch": MismatchError,
    "timeout": PeerError,
    "peer failed": PeerError,
}


def raise_status(code, message):
    """Called by the C++ module to raise what a Status says."""
    raise _CLASSES.get(code, CortadoError)(message, code)
