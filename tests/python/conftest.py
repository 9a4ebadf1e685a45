# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

import pytest
from ranks import Pools

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

import links


@pytest.fixture(scope="session")
def pools():
    """pools(3) is a Pool of three ranks."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def namespaces():
    """For tests of ranks in network namespaces of their own: skips them where none can be made, and says why."""
    if why := links.why_not_shaped():
        pytest.skip(why)
