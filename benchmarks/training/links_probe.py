# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Whether links of a rate can be made here: makes them, and sends nothing. Prints why not, and ends with 1.

python benchmarks/training/links_probe.py 1gbit
"""

import sys

from links import Links


def main() -> int:
    try:
        with Links(2, sys.argv[1]) as links:
            print(links.why_loopback or links.describe())
            return 0 if links.namespaced else 1
    except (OSError, RuntimeError) as error:  # the kernel's own reason, for example of a missing module
        print(" ".join(str(error).split()))
        return 1


if __name__ == "__main__":
    sys.exit(main())
