# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""K-FAC against SGD and Adam, and its exchange with and without compression.

    python benchmarks/training/second_order.py --untimed               # losses of all methods, three seeds
    python benchmarks/training/second_order.py --rates 100mbit,1gbit   # over shaped links: loss against wall time
    python benchmarks/training/second_order.py --exchange              # time of the exchange alone, by link rate
    python benchmarks/training/second_order.py --task deep-lm --rates 1gbit --steps 150 --workers 2 \\
        --strategy dp-kfac --compute-method inverse --factor-update-steps 10 --inv-update-steps 50 \\
        --gradients "acp(rank=4)"                                      # 62 % of a step is exchange

Methods are named as second_order_methods.py says. The exchange is that of preconditioned gradients: encode, all-gather
and decode, nothing else; beside it a broadcast for each tensor, as kfac-pytorch sends them. The strategy is the same in
all rows. Runs that second_order.jsonl already holds are skipped; `--again` measures them anew.

`--kfac-pytorch DIR`, a checkout of https://github.com/gpauloski/kfac-pytorch, runs that project beside ours: the method
`kfac-pytorch`, and its communicator in `--exchange`. It is imported as it is.
"""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from conditions import describe_machine, source_commit
from launch import WorkerFailed, run_workers
from links import UNSHAPED, Links, why_rates_cannot_be
from methods import require_cortado
from records import append_record, read_records
from second_order_methods import KFAC_PYTORCH, parse_method
from second_order_report import SETTINGS, training_key, write_report

ROOT = Path(__file__).resolve().parents[2]
COMPSO = ["compso(bound=4e-3)", "compso(bound=2e-2)", "compso(bound=1e-1)"]
FIRST_ORDER = [
    "cast(bf16)",
    "quant(bits=8, block=512, round=stochastic)",
    "quant(bits=4, block=512, round=stochastic)",
    "compso(bound=2e-2, filter=off, round=nearest)",  # as SZ: error-bounded, nearest, entropy-coded
    "randk(density=0.2) | topk(density=0.1) | quant(bits=4)",  # as CocktailSGD
    "topk(density=0.01)",
]
CODECS = [
    *COMPSO,
    "compso(error=0.5, round=dead_zone)",
    "compso(error=0.5, round=dead_zone) + feedback",
    *[codec + feedback for codec in FIRST_ORDER for feedback in ("", " + feedback")],
]
METHODS = ["sgd", "adam", "kfac + broadcasts", "kfac", *(f"kfac + {codec}" for codec in CODECS)]
RATES = ["100mbit", "1gbit", UNSHAPED]


def conditions_of(options, links: Links) -> dict:
    return {
        "task_name": options.task,
        "rate": links.rate,
        **{setting: getattr(options, setting) for setting in SETTINGS},
        "commit": source_commit(),
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe_machine(),
        "links": links.describe(),
    }


def run(options, rate: str, runs: list, codecs: list[str], raw: Path) -> None:
    """Trains the runs, or times the exchange of the codecs, and appends each result as it comes."""
    config = {
        **{setting: getattr(options, setting) for setting in SETTINGS},
        "task": options.task,
        "losses_only": options.losses_only,
        "runs": runs,
        "codecs": codecs,
        "exchange_steps": options.exchange_steps,
        "seconds": options.seconds,
        "kfac_pytorch": str(options.kfac_pytorch.resolve()) if options.kfac_pytorch else None,
    }
    # The training before an exchange is not timed, so links get their rate when it is done, which the workers are told.
    with TemporaryDirectory() as folder, Links(options.workers, rate, shaped_later=bool(codecs)) as links:
        shaped = Path(folder) / "shaped"
        config["shaped"] = str(shaped)
        conditions = conditions_of(options, links)
        print(f"{options.task}: {len(runs)} runs, {len(codecs)} codecs; {links.describe()}", flush=True)

        def on_event(event: dict) -> None:
            kind = event.pop("event")
            if kind == "progress":
                print(f"  {event['method']}, seed {event['seed']}: step {event['step']}, loss {event['loss']:.3f}")
            elif kind == "result":
                append_record(raw, {"kind": "training", **conditions, **event})
                step_ms = event["step_ms"]
                step = f"{sum(step_ms) / len(step_ms):.1f} ms a step, " if step_ms else ""
                print(
                    f"{event['method']}, seed {event['seed']}: {step}training {event['training_loss']:.4f}, "
                    f"validation {event.get('validation_loss', float('nan')):.4f}",
                    flush=True,
                )
            elif kind == "trained":
                links.shape()
                shaped.touch()
            elif kind == "exchange":
                append_record(
                    raw, {"kind": "exchange", "exchange_steps": options.exchange_steps, **conditions, **event}
                )
                ratio = event["dense_bytes"] / event["payload_bytes"]
                print(f"{rate}, {event['codec']}: {event['ms']:.2f} ms, ratio {ratio:.1f} at {event['error']:.3f}")

        run_workers(links, Path(__file__).with_name("second_order_worker.py"), config, on_event, 600)


def missing_runs(options, rate: str, raw: Path) -> list:
    wanted = [(method, seed) for seed in range(options.seeds) for method in options.methods]
    if options.again:
        return wanted
    asked = training_key({"task_name": options.task, "rate": rate, **vars(options)})
    wants_times = options.timed and not options.losses_only
    done = {
        (record["method"], record["seed"])
        for record in read_records(raw)
        if record["kind"] == "training" and training_key(record) == asked and (record["step_ms"] or not wants_times)
    }
    return [one for one in wanted if one not in done]


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", default="digits", help="one of models.py, such as autoencoder (default: digits)")
    parser.add_argument("--methods", help="separated by ';' (default: all)")
    parser.add_argument("--rates", help=f"default: {UNSHAPED} for training, {','.join(RATES)} for --exchange")
    parser.add_argument("--exchange", action="store_true", help="time the exchange instead of training")
    parser.add_argument("--codecs", help="of --exchange, separated by ';' (default: all)")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each codec and rate of --exchange")
    parser.add_argument("--exchange-steps", type=int, default=20, help="of training before the exchange is timed")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--strategy", default="mem-opt", choices=["mem-opt", "dp-kfac", "comm-opt", "hybrid-opt"])
    parser.add_argument("--grad-worker-fraction", type=float, default=0.5, help="of hybrid-opt")
    parser.add_argument("--compute-method", default="eigen", choices=["eigen", "inverse"])
    parser.add_argument("--factor-update-steps", type=int, default=2)
    parser.add_argument("--inv-update-steps", type=int, default=10)
    parser.add_argument("--damping", type=float, default=0.03)
    parser.add_argument("--skip-layers", nargs="*", default=[])
    parser.add_argument("--gradients", default="", help="codec with which Cortado averages gradients in all methods")
    parser.add_argument("--untimed", dest="timed", action="store_false", help="losses only: the machine is not idle")
    parser.add_argument(
        "--losses-only", action="store_true", help="as --untimed, but in the table of timed runs: more seeds for it"
    )
    parser.add_argument("--kfac-pytorch", type=Path, metavar="DIR", help="a checkout of it, to run it as well")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--again", action="store_true", help="measure runs that are there already, too")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()

    def split(names: str | None, default: list[str]) -> list[str]:
        return [name.strip() for name in names.split(";")] if names else default

    options.methods = split(options.methods, METHODS + [KFAC_PYTORCH] * bool(options.kfac_pytorch))
    options.codecs = split(options.codecs, ["none", *CODECS])
    options.rates = options.rates.split(",") if options.rates else RATES if options.exchange else [UNSHAPED]
    try:
        hosts = {parse_method(method).host for method in options.methods}
    except ValueError as error:
        parser.error(str(error))
    if KFAC_PYTORCH in hosts and not (options.kfac_pytorch and (options.kfac_pytorch / "kfac").is_dir()):
        parser.error("the method kfac-pytorch needs --kfac-pytorch DIR, a checkout of it")
    if KFAC_PYTORCH in hosts and options.strategy == "dp-kfac":
        parser.error("kfac-pytorch has no dp-kfac")
    try:
        why = None if options.report_only else why_rates_cannot_be(options.rates)
    except ValueError as error:
        parser.error(str(error))
    if why:
        parser.error(why)
    return options


def main() -> int:
    options = parse_options()
    raw = options.out / "second_order.jsonl"
    try:
        for rate in [] if options.report_only else options.rates:
            require_cortado(["compso"])
            runs = [] if options.exchange else missing_runs(options, rate, raw)
            if options.exchange or runs:
                run(options, rate, runs, options.codecs if options.exchange else [], raw)
    except WorkerFailed as error:
        print(f"second_order: {error}", file=sys.stderr)
        return 1
    print(f"wrote {write_report(read_records(raw), options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
