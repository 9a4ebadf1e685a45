# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The program ``python -m cortado.calibrate``, for torchrun; in a program call ``cortado.calibrate()``."""

import sys

from .calibration import main

if __name__ == "__main__":
    sys.exit(main())
