# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
import pytest
from ranks import Pools


@pytest.fixture(scope="session")
def pools():
    """pools(3) is a Pool of three ranks."""
    pools = Pools()
    yield pools
    pools.close()
