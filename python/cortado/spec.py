# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The three ways to say what to do: a codec string, a dict, or the path of a JSON file that holds such a dict."""

import json
import os

from .errors import SpecError


def spec_from(plan):
    """Returns the codec string of ``plan``.

    "acp(rank=4)", {"codec": "acp", "rank": 4} and a path ending in .json whose file holds that dict mean the same.
    """
    if isinstance(plan, dict):
        return _spec_from_dict(plan, "the plan")
    if isinstance(plan, os.PathLike):
        plan = os.fspath(plan)
    if not isinstance(plan, str):
        raise SpecError(f"plan must be a codec string, a dict or the path of a .json file, got {type(plan).__name__}")
    if not plan.endswith(".json"):
        return plan
    try:
        with open(plan, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise SpecError(f'can\'t read the plan "{plan}": {error}') from error
    if not isinstance(content, dict):
        raise SpecError(f'the plan "{plan}" must hold an object with a "codec", got {type(content).__name__}')
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
    first = f"{first[:-1]}, {arguments})" if first.endswith(")") else f"{first}({arguments})"
    return f"{first} {bar}{others}" if bar else first


def _text(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value)
