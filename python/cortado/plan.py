# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Plans: which tensors travel together and how (docs/plan_format.md)."""

from . import _core
from .checked_file import CheckedFile

FORMAT = "cortado.plan/1"


class Plan(CheckedFile):
    """A checked plan, from its content as a dict (or JSON text), or Plan.load() of a file.

    plan = cortado.Plan.load("plan.json")
    state = cortado.attach(ddp, plan)            # or attach(ddp, "plan.json")
    content = plan.to_dict()                     # change it ...
    state.switch_plan(cortado.Plan(content))     # ... and go on with it, on every rank before the same step
    """

    _kind = "plan"
    _canonical = staticmethod(_core.canonical_plan)
    _save = staticmethod(_core.save_plan)

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
