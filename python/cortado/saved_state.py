# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Checks of what load_state_dict() is given: what does not fit must be refused before ranks wait for each other."""

import torch

from .errors import MismatchError


def check_state(state, format, **kinds):
    """MismatchError unless ``state`` is a dict of that format that has each of ``kinds``, a type each; int: of at least
    0."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != format:
        raise MismatchError(f'load_state_dict expects a state of format "{format}", got {found!r}')
    missing = [key for key in kinds if key not in state]
    if missing:
        raise MismatchError(f"load_state_dict: the state lacks {', '.join(missing)}")
    for key, kind in kinds.items():
        check_is(key, state[key], kind)


def check_is(place, value, kind):
    is_right = isinstance(value, kind) and not (kind is int and (isinstance(value, bool) or not 0 <= value < 2**31))
    if is_right:
        return
    expected = "number from 0 to 2147483647" if kind is int else kind.__name__
    found = repr(value) if isinstance(value, int) else type(value).__name__
    raise MismatchError(f"load_state_dict: {place} of the state: expected a {expected}, got {found}")


def array_of(place, tensor):
    """The values of a tensor of one dimension, as a numpy array of float32."""
    check_is(place, tensor, torch.Tensor)
    if tensor.dim() != 1 or not tensor.is_floating_point():
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise MismatchError(f"load_state_dict: {place} of the state: expected floats in one dimension, got {found}")
    return tensor.detach().float().cpu().contiguous().numpy()
