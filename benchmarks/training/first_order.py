# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The evaluation of ACP-SGD (ICDCS 2023), done again on this engine: where does a step's time go, and what for?

    python benchmarks/training/first_order.py                     # every study, about half an hour
    python benchmarks/training/first_order.py --studies methods-1gbit,rank
    python benchmarks/training/first_order.py --report-only

Each study is one run in which all its methods are measured in rotation; rows go to first_order.jsonl, and
first_order.md with its pictures is made from the latest run of each. Step times only: the losses that go
with them are `accuracy.py`'s, on two nets at rank 4 in the study `accuracy`.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from first_order_report import write_report
from launch import WorkerFailed
from links import UNSHAPED, why_rates_cannot_be
from methods import require_cortado
from quality import measure as measure_quality
from records import append_record, read_records
from speed import PUBLISHED, ROOT
from speed import measure as measure_speed

# `sign` takes the vote of the majority, whose payloads are gathered; S-SGD is PyTorch's own.
LIMIT, S_SGD = "no-communication", "ddp"
EVALUATED = [
    LIMIT,
    S_SGD,
    "bf16",
    "powersgd(rank=4)",
    "sign(vote=majority)",
    "topk(density=0.001)",
    "power(rank=4, overlap=off)",
    "power(rank=4)",
    PUBLISHED,
    "acp(rank=4)",
]
BASELINES = [LIMIT, S_SGD, "bf16", "powersgd(rank=4)"]
SWEPT = [*BASELINES, "power(rank=4)", "acp(rank=4)"]
# Those that are gathered receive more with each worker, those that are summed do not.
WITH_GATHERED = [*SWEPT, "sign(vote=majority)", "topk(density=0.001)"]


@dataclass(frozen=True)
class Study:
    """One run of `speed.py`: which methods, on which model over which links."""

    question: str
    methods: list[str] = field(default_factory=lambda: SWEPT)
    model: str = "gpt"
    rate: str = "1gbit"
    workers: int = 4


def ranks(codec: str) -> list[str]:
    return [f"{codec}(rank={rank})" for rank in (1, 2, 4, 8, 16, 32)]


STUDIES = {
    "methods-100mbit": Study("Which method is fastest at 100 Mb/s?", EVALUATED, rate="100mbit"),
    "methods-1gbit": Study("Which method is fastest at 1 Gb/s?", EVALUATED),
    "methods-10gbit": Study("And at 10 Gb/s?", EVALUATED, rate="10gbit"),
    "methods-vgg": Study("And on a net whose gradient is large for its computing?", EVALUATED, model="vgg"),
    "methods-digits": Study(
        "And on a small net without a slow link, where nothing is to be gained?", EVALUATED, "digits", UNSHAPED
    ),
    "collectives": Study(
        "What does a sum of payloads gain over a gather of them?",
        BASELINES
        + [
            f"{codec} via {collective}"
            for codec in ("cast(bf16)", "randk(density=0.01)", "quant(abs_bound=1e-4, bits=8)", "acp(rank=4)")
            for collective in ("all_reduce", "all_gather")
        ],
    ),
    "overlap": Study(
        "What does overlap with the backward pass gain?",
        [
            *BASELINES,
            "none",
            "none(overlap=off)",
            "power(rank=4)",
            "power(rank=4, overlap=off)",
            "acp(rank=4)",
            "acp(rank=4, overlap=off)",
        ],
    ),
    "fusion": Study(
        "What does fusion gain, and which size of messages?",
        [*BASELINES, "acp(rank=4)"] + [f"acp(rank=4, bucket_cap_mib={cap})" for cap in (0, 1, 5, 25, 100)],
    ),
    "rank": Study("What does matrix rank cost?", [*BASELINES, *ranks("power"), *ranks("acp")]),
    "batch-1": Study("What does a smaller batch change?", model="gpt-1"),
    "batch-4": Study("What does a larger batch change?", model="gpt-4"),
    "batch-8": Study("And an even larger one?", model="gpt-8"),
    "workers-2": Study("What does the number of workers change? 2", WITH_GATHERED, workers=2),
    "workers-3": Study("3", WITH_GATHERED, workers=3),
    "workers-5": Study("5", WITH_GATHERED, workers=5),
}

ACCURACY = "accuracy"
ACCURACY_STEPS = 500
ACCURACY_METHODS = [
    S_SGD,
    "power(rank=4)",
    "acp(rank=4)",
    "acp(rank=8)",  # the bytes of power(rank=4)
    PUBLISHED,
    "acp(rank=4, use_error_feedback=false)",
    "acp(rank=4, warm_start=false)",
]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = [*STUDIES, ACCURACY]
    parser.add_argument("--studies", default=",".join(known), help="separated by ',' (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--discard", type=int, default=2, help="untimed steps a method and round")
    parser.add_argument("--timed", type=int, default=5, help="timed steps a method and round")
    parser.add_argument("--seeds", type=int, default=3, help="of the study accuracy")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--again", action="store_true", help="of the study accuracy: measure anew what is there")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    options.studies = [] if options.report_only else options.studies.split(",")
    if unknown := set(options.studies) - set(known):
        parser.error(f"--studies: {unknown.pop()!r} is none of {', '.join(known)}")
    rates = list(dict.fromkeys(STUDIES[name].rate for name in options.studies if name in STUDIES))
    free = [*(name for name, study in STUDIES.items() if study.rate == UNSHAPED), ACCURACY]
    if why := why_rates_cannot_be(rates, f"--studies {','.join(free)}"):
        parser.error(why)
    options.device = "cpu"
    options.rate = "1gbit"  # of the step times that equal time goes by
    return options


def run(name: str, options, raw: Path) -> None:
    if name == ACCURACY:
        options.workers = 4
        for task in ("vgg-digits", "resnet-digits"):
            measure_quality(task, ACCURACY_METHODS, ACCURACY_STEPS, options, options.out / "first_order_accuracy.jsonl")
        return
    study = STUDIES[name]
    print(f"{name}: {study.question}", flush=True)
    options.methods, options.workers = study.methods, study.workers
    append_record(raw, {"study": name, **measure_speed(study.model, study.rate, options)})


def main() -> int:
    options = parse_arguments()
    raw = options.out / "first_order.jsonl"
    require_cortado(["acp"] if options.studies else [])
    try:
        for name in options.studies:
            run(name, options, raw)
    except WorkerFailed as error:
        print(f"first_order: {error}", file=sys.stderr)
        return 1
    records = {record["study"]: record for record in read_records(raw)}
    accuracy = read_records(options.out / "first_order_accuracy.jsonl")
    questions = {name: study.question for name, study in STUDIES.items()}
    print(f"wrote {write_report(questions, records, accuracy, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
