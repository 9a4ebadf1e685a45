# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Final loss of lossy codecs at their usual settings, on two tasks, over paired seeds, dense beside them.

    python benchmarks/training/accuracy.py
    python benchmarks/training/accuracy.py --tasks digits --methods "ddp; topk(density=0.01)"

The byte-level GPT of examples/train_lm.py and the digits of examples/train_digits.py; otherwise as
`quality.py`: runs that accuracy.jsonl already holds are skipped, so an interrupted sweep goes on where
it stopped. The page says which are missing.
"""

import argparse
import sys

from launch import WorkerFailed
from quality import measure, parse_options
from quality_report import write_report
from records import read_records

STEPS = {"gpt": 300, "digits": 500}
METHODS = [
    "ddp",
    "bf16",
    "powersgd(rank=4)",
    "cast(bf16)",
    "fp8(e4m3)",
    "sign(scale=mean_abs)",
    "sign(scale=two_means)",
    "sign(vote=majority)",
    "topk(density=0.01)",
    "topk(density=0.01, select=sampled)",
    "randk(density=0.01)",
    "quant(bits=4, round=dead_zone)",
    "quant(bits=4, round=stochastic)",
    "quant(bits=4, round=dither)",
    "quant(error=0.1, coder=rans)",
    "quant(error=0.3, round=dead_zone, coder=rans)",
    "compso(bound=4e-3)",
    "compso(error=0.1, round=dead_zone)",
    "topk(density=0.01) | quant(bits=4) | rans",
    "randk(density=0.1) | topk(density=0.1) | quant(bits=4)",
    "acp(rank=4)",
    "power(rank=4)",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", default=",".join(STEPS), help="separated by ',' (default: all)")
    options = parse_options(parser)
    tasks = options.tasks.split(",")
    if unknown := [task for task in tasks if task not in STEPS]:
        parser.error(f"unknown task {unknown[0]}; known are {', '.join(STEPS)}")
    raw = options.out / "accuracy.jsonl"
    try:
        if not options.report_only:
            for task in tasks:
                measure(task, options.methods or METHODS, STEPS[task], options, raw)
    except WorkerFailed as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 1
    wanted = dict.fromkeys(STEPS, METHODS)
    page = write_report(read_records(raw), options.out / "accuracy.md", "Accuracy of lossy codecs", wanted)
    print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
