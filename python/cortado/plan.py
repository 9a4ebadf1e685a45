# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Plans: which tensors travel together and how (docs/plan_format.md)."""

import json
import os

from . import _core
from .errors import CortadoError, SpecError

FORMAT = "cortado.plan/1"


class Plan:
    """A checked plan, from its content as a dict (or JSON text), or Plan.load() of a file.

        plan = cortado.Plan.load("plan.json")
        state = cortado.attach(ddp, plan)            # or attach(ddp, "plan.json")
        content = plan.to_dict()                     # change it ...
        state.switch_plan(cortado.Plan(content))     # ... and go on with it, on every rank before the same step

    What is wrong is a SpecError with the place in the file, what was found and what was expected. Fields that cortado
    does not know are kept.
    """

    def __init__(self, content):
        text = content if isinstance(content, str) else json.dumps(content)
        self._json = _core.canonical_plan(text)

    @classmethod
    def load(cls, path):
        path = os.fspath(path)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f'can\'t read the plan "{path}": {error}') from error
        try:
            return cls(text)
        except CortadoError as error:
            raise type(error)(f"{path}: {error}", error.code) from error

    def save(self, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._json)

    def to_dict(self):
        return json.loads(self._json)

    def to_json(self):
        return self._json

    @property
    def hash(self):
        """Equal for plans that do the same; all ranks must have the same."""
        return _core.plan_hash(self._json)

    def __eq__(self, other):
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    __hash__ = None

    def __str__(self):
        content = self.to_dict()
        ranks = " x ".join(f"{level['ranks']} {level['name']}" for level in content["levels"])
        lines = [f"plan {self.hash:016x} for {ranks}, {len(content['buckets'])} buckets"]
        for bucket in content["buckets"]:
            names = bucket["tensors"]
            tensors = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            lines.append(f"  {tensors}: {bucket['codec']}: {_option_text(bucket['option'])}")
        return "\n".join(lines)


def _option_text(option):
    places = (op.get("device") or "..".join(op["levels"]) for op in option)
    return " ".join(f"{op['op']}@{place}" for op, place in zip(option, places, strict=True))
