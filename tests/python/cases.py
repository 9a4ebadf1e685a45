# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Which cases of a test `make test` runs; `make test-all` runs all."""

import pytest


def slow_but(quick, cases):
    """``cases`` for parametrize(): those whose numbers are in ``quick`` are run by `make test`, the others are slow."""
    unknown = set(quick) - set(range(len(cases)))
    assert not unknown, f"there are {len(cases)} cases, {unknown} is none"
    return [case if number in quick else _slow(case) for number, case in enumerate(cases)]


def _slow(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
