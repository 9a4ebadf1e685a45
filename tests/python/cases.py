# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Cases of parametrised tests."""

import pytest


def repeated(*case):
    """A case for parametrize() that goes where others go: left to `make test-all`."""
    return pytest.param(*case, marks=pytest.mark.repeated)
