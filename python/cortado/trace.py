# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What the engine did and when, on one rank: one stream of events and its views."""

import json
import os

from . import _core
from .errors import CortadoError


class Trace:
    """A recorded trace: from state.trace(), or load_trace() of a file.

    ``str()`` draws each step over time, summary() tells where the time went, save() keeps it for later (the file format
    is docs/trace_format.md; `cortado trace FILE` shows it), save_chrome() is for chrome://tracing or Perfetto.
    """

    def __init__(self, text):
        self._json = text

    def __str__(self):
        return _core.trace_to_text(self._json)

    def summary(self, by="stage"):
        """A table, one row a "stage" or a "tensor"."""
        if by not in ("stage", "tensor"):
            raise ValueError(f'summary(by=) is "stage" or "tensor", got {by!r}')
        return _core.summarize_trace(self._json, by == "tensor")

    def to_dict(self):
        """The content of the file: format, spec, rank, world_size, tensors, stages, events."""
        return json.loads(self._json)

    def save(self, path):
        _write(path, self._json)

    def save_chrome(self, path):
        _write(path, _core.trace_to_chrome(self._json))


def load_trace(path):
    """The trace that Trace.save() wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise CortadoError(f'can\'t read the trace "{path}": {error}', "input/output error") from error
    try:
        _core.trace_to_text(text)
    except CortadoError as error:
        raise CortadoError(f"{path}: {error}", error.code) from error
    return Trace(text)


def _write(path, text):
    try:
        _core.write_file(os.fsencode(path), text)
    except CortadoError as error:
        raise CortadoError(f'can\'t write the trace to "{path}": {error}', error.code) from error
