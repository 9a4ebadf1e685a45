# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What plans and profiles have in common: JSON that C++ reads, checks and writes."""

import json
import os

from .errors import CortadoError, SpecError


class CheckedFile:
    """A checked file, from its content as a dict (or JSON text), or load() of a path.

    What is wrong is a SpecError with the place in the file, what was expected and what was found. Fields that cortado
    does not know are kept.
    """

    _kind = ""  # for messages
    _canonical = None  # of _core: checks a text and returns it as cortado writes it
    _save = None  # of _core: writes a text to a path

    def __init__(self, content):
        text = content if isinstance(content, str) else json.dumps(content)
        try:
            self._json = type(self)._canonical(text)
        except CortadoError as error:
            raise SpecError(str(error), error.code) from error

    @classmethod
    def load(cls, path):
        path = os.fspath(path)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f'can\'t read the {cls._kind} "{path}": {error}') from error
        try:
            return cls(text)
        except CortadoError as error:
            raise type(error)(f"{path}: {error}", error.code) from error

    def save(self, path):
        """What was in the file before stays there until all is written."""
        raw = os.fsencode(path)
        if b"\0" in raw:
            raise SpecError(f"can't write the {self._kind}: expected a path, got {path!r}, which has a NUL")
        try:
            type(self)._save(self._json, raw)
        except CortadoError as error:
            raise SpecError(f"can't write the {self._kind}: {error}") from error

    def to_dict(self):
        return json.loads(self._json)

    def to_json(self):
        return self._json
