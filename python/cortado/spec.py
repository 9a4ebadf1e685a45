# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The ways to say what to do: a codec string, a dict, a plan, or the path of a JSON file that holds one of the two."""

import json
import os

from . import _core
from .errors import SpecError
from .plan import FORMAT, Plan


def text_for_engine(plan):
    """What the engine takes for ``plan``: a codec string in its canonical form, or the JSON text of a plan.

    "acp(rank=4)", {"codec": "acp", "rank": 4} and a path ending in .json whose file holds that dict mean the same; so
    do a Plan, its content and the path of its file.
    """
    found = _spec_or_plan(plan)
    return found.to_json() if isinstance(found, Plan) else _core.canonical_spec(found)


def spec_from(codec):
    """The codec string of ``codec``, which may not be a plan."""
    if not isinstance(codec, (str, dict, os.PathLike, Plan)):
        raise SpecError(f'a codec is expected here, such as "acp(rank=4)" or a dict, got {type(codec).__name__}')
    found = _spec_or_plan(codec)
    if isinstance(found, Plan):
        raise SpecError('a codec is expected here, such as "acp(rank=4)", got a plan')
    return found


def _spec_or_plan(plan):
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, dict):
        return Plan(plan) if "format" in plan else _spec_from_dict(plan, "the plan")
    if isinstance(plan, os.PathLike):
        plan = os.fspath(plan)
    if not isinstance(plan, str):
        raise SpecError(
            f"plan must be a codec string, a dict, a Plan or the path of a .json file, got {type(plan).__name__}"
        )
    if not plan.endswith(".json"):
        if os.path.isfile(plan):
            raise SpecError(f'"{plan}" is a file; the name of a plan\'s file ends in .json')
        return plan
    try:
        with open(plan, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise SpecError(f'can\'t read the plan "{plan}": {error}') from error
    if not isinstance(content, dict):
        raise SpecError(f'the plan "{plan}" must hold an object with a "codec", got {type(content).__name__}')
    found = str(content.get("format", ""))
    if found.startswith(FORMAT.split("/")[0]):
        return Plan.load(plan)
    if found.startswith("cortado."):
        raise SpecError(f'"{plan}" is no plan but a {found}: `cortado plan JOB CLUSTER -o plan.json` makes one')
    return _spec_from_dict(content, f'the plan "{plan}"')


def _spec_from_dict(plan, where):
    options = dict(plan)
    codec = options.pop("codec", None)
    if not isinstance(codec, str):
        raise SpecError(f'{where} needs a "codec", such as {{"codec": "acp", "rank": 4}}; it has {sorted(plan)}')
    arguments = ", ".join(f"{key}={_text(value)}" for key, value in options.items())
    if not arguments:
        return codec
    # The options join those of the first codec: "topk(density=0.01) | quant" has more to say than its name.
    first, bar, others = codec.partition("|")
    first = first.rstrip()
    first = first.removesuffix("()")
    first = f"{first[:-1]}, {arguments})" if first.endswith(")") else f"{first}({arguments})"
    return f"{first} {bar}{others}" if bar else first


def _text(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value)
