# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Errors of one rank on all ranks, while a job is set up."""

import contextlib

from .errors import CortadoError, MismatchError, PeerError, SpecError, sendable

SETUP_TIMEOUT_S = 60.0  # how long a rank waits for the others

_TEXT_BYTES = 400


def gather(group, block, timeout_s):
    """Every rank's block, one behind the other in rank order; all have as many bytes."""
    try:
        return group.all_gather(block, timeout_s)
    except (RuntimeError, TimeoutError) as broken:
        raise PeerError(f"every rank must take part: {broken}") from broken


@contextlib.contextmanager
def on_all_ranks(group, failed_to, timeout_s=SETUP_TIMEOUT_S):
    """An error in the body, on whichever rank, is raised on all of them, before they wait for each other."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    text = "" if error is None else str(error) or type(error).__name__
    try:
        texts = _gather_texts(group, text, timeout_s)
    except PeerError as broken:
        raise error or broken from broken.__cause__
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise MismatchError(f"rank {rank} {failed_to}: {text}")


@contextlib.contextmanager
def damage_ends_all(group):
    """What came damaged may have come so to this rank alone: the others, who wait for it, are told. group: or None."""
    try:
        yield
    except CortadoError as error:
        if group is not None and error.code == "corrupt data":
            group.announce(str(error))
        raise


def agree_on_flag(group, name, flag, timeout_s=SETUP_TIMEOUT_S):
    """SpecError where ``flag`` is no bool, MismatchError on all ranks where they differ. group: or None."""
    own = flag if isinstance(flag, bool) else 2
    gathered = gather(group, bytes([own]), timeout_s) if group is not None else [own]
    if own == 2:
        raise SpecError(f"{name} is True or False; got {flag!r}")
    said = [("False", "True", "neither")[byte] for byte in gathered]
    if len(set(said)) > 1:
        raise MismatchError(f"{name} differs: ranks have {', '.join(said)}")


def agree_on_text(group, name, text, timeout_s=SETUP_TIMEOUT_S):
    """MismatchError on all ranks where they differ, in the first bytes of ``text`` at least."""
    said = _gather_texts(group, text, timeout_s)
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            raise MismatchError(f"{name} differ: rank 0 has {said[0]}, rank {rank} has {theirs}")


def _gather_texts(group, text, timeout_s):
    """Every rank's text, cut off where it is longer than _TEXT_BYTES."""
    texts = gather(group, sendable(text).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), timeout_s)
    return [
        texts[at : at + _TEXT_BYTES].rstrip(b"\0").decode(errors="replace") for at in range(0, len(texts), _TEXT_BYTES)
    ]
