# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `second_order.py`: trains with and without K-FAC, and times the exchange alone."""

import statistics
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from unittest import mock

import cortado
import torch
import torch.distributed as dist
from cortado.group import TorchGroup
from models import TASKS, Task
from second_order_methods import KFAC, KFAC_PYTORCH, parse_method
from torch.nn.parallel import DistributedDataParallel
from trainer import emit, mean_over_ranks, replicas_equal, start_worker

FINAL_STEPS = 10  # the final training loss is the mean of these
EXCHANGED_STEPS = 8  # whose preconditioned gradients are exchanged in turn
EXCHANGE = ("encode", "gather", "decode")  # stages of a step
LEARNING_RATES = {"sgd": 0.05, "adam": 1e-3, KFAC: 0.03}
LEARNING_RATES_OF_TASK = {"autoencoder": {"sgd": 0.01, "adam": 3e-3, KFAC: 0.02}}


class BroadcastGroup(TorchGroup):
    """Sends a gather's bytes as one broadcast a layer, all started at once."""

    pieces: list | None = None  # bytes of the layers of each rank

    def _all_gather(self, call):
        if call.counts is None or self.pieces is None:
            return super()._all_gather(call)
        everything = self._tensor(call.received, sum(call.counts), call.dtype)
        works, at = [], 0
        for root, count in enumerate(call.counts):
            share = everything[at : at + count]
            at += count
            if root == self.rank and count:
                share.copy_(self._tensor(call.sent, count, call.dtype))
            sizes = [size // call.dtype.itemsize for size in self.pieces[root]]
            rest = count - sum(sizes)  # what travels beside the layers goes with the last of them
            sizes = [*sizes[:-1], sizes[-1] + rest] if sizes else [rest]
            options = self._options(dist.BroadcastOptions())
            options.rootRank = root
            works += [self._group.broadcast([part], options) for part in share.split(sizes) if part.numel()]
        return _Broadcasts(works)


class _Broadcasts:
    """Of one gather; what TorchGroup keeps of a collective, and the handle itself."""

    held = finish = None

    def __init__(self, works):
        self.handle = self
        self._works = works

    def is_completed(self):
        return all(work.is_completed() for work in self._works)

    def wait(self, *timeout):
        return all(work.wait(*timeout) for work in self._works)


class BroadcastKFAC(cortado.KFAC):
    """K-FAC with a broadcast a layer. Everything else is as it is: the same bytes arrive."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        sizes = [4 * layer.inputs + 4 * layer.has_bias for layer in self._layers]
        sizes = [size * layer.outputs * layer.groups for size, layer in zip(sizes, self._layers, strict=True)]
        owners = [owner for owner, _, _ in self._core.placements]
        self._group.pieces = [
            [size for size, owner in zip(sizes, owners, strict=True) if owner == rank]
            for rank in range(self._group.world_size)
        ]

    @staticmethod
    def _make_group(process_group):
        return BroadcastGroup(process_group)


def make_kfac(model, config: dict, method, lr: float):
    strategy = config["strategy"]
    fraction = {"grad_worker_fraction": config["grad_worker_fraction"]} if strategy == "hybrid-opt" else {}
    return (BroadcastKFAC if method.broadcasts else cortado.KFAC)(
        model,
        strategy=strategy,
        **fraction,
        compute_method=config["compute_method"],
        factor_update_steps=config["factor_update_steps"],
        inv_update_steps=config["inv_update_steps"],
        damping=config["damping"],
        lr=lr,
        skip_layers=config["skip_layers"],
        compression=method.compression(),
        factor_compression=method.factor_codec,
        error_feedback=method.feedback,
        verbose=False,
    )


def import_kfac_pytorch(folder: str):
    """The package `kfac` of a checkout. It asks for the version it was installed as, and it is not installed."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    warnings.filterwarnings("ignore", message="NVIDIA Apex")
    installed = metadata.version
    with mock.patch("importlib.metadata.version", lambda name: "0" if name == "kfac-pytorch" else installed(name)):
        import kfac.distributed
        import kfac.preconditioner
    return kfac


def make_kfac_pytorch(model, config: dict, method, lr: float):
    """kfac-pytorch's own preconditioner, with the same options; factors as triangles, as ours."""
    kfac = import_kfac_pytorch(config["kfac_pytorch"])
    fractions = {"comm-opt": 1.0, "hybrid-opt": config["grad_worker_fraction"], "mem-opt": 1 / dist.get_world_size()}
    preconditioner = kfac.preconditioner.KFACPreconditioner(
        model,
        grad_worker_fraction=fractions[config["strategy"]],
        compute_method=config["compute_method"],
        factor_update_steps=config["factor_update_steps"],
        inv_update_steps=config["inv_update_steps"],
        damping=config["damping"],
        lr=lr,
        skip_layers=config["skip_layers"],
        symmetry_aware=True,
    )
    if method.codec != "none":
        from kfac_pytorch_communicator import use_in

        use_in(preconditioner, codec=method.codec, error_feedback=method.feedback)
    return preconditioner


def data_parallel(net, config: dict, method, is_own_kfac: bool):
    """K-FAC averages gradients itself, only to owners; the others have DDP. `gradients`: Cortado does, for all."""
    if config["gradients"]:
        ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
        cortado.attach(ddp, config["gradients"], verbose=False)
        return ddp
    return net if is_own_kfac else DistributedDataParallel(net)


class Messages:
    """What this rank sent, by kind of message: the bytes of each, and the relative L2 error of each that had any."""

    def __init__(self):
        self._count: dict[str, int] = {}
        self.payload_bytes: dict[str, list[int]] = {}
        self.errors: dict[str, list[float]] = {}

    def note(self, kfac) -> None:
        for kind, traffic in kfac.report().to_dict()["traffic"].items():
            if traffic["messages"] == self._count.get(kind, 0):
                continue
            self._count[kind] = traffic["messages"]
            self.payload_bytes.setdefault(kind, []).append(traffic["payload_bytes"])
            if traffic["payload_bytes"]:
                self.errors.setdefault(kind, []).append(traffic["relative_error"])


class Exchanges:
    """When this rank began and ended the exchange of each step, by the clock that all ranks of a machine share."""

    def __init__(self):
        self._before: dict[str, int] = {}
        self._times: list[tuple[float, float]] = []

    def note(self, kfac, end_s: float) -> None:
        """After a step that returned at end_s. What follows the exchange in it is writing the gradients (apply)."""
        total = kfac.report().to_dict()["time_by_stage_ns"]
        took_s = {stage: (ns - self._before.get(stage, 0)) / 1e9 for stage, ns in total.items()}
        self._before = total
        end_s -= took_s["apply"]
        self._times.append((end_s - sum(took_s[stage] for stage in EXCHANGE), end_s))

    def mean_span_ms(self) -> float:
        """From when the last rank began until the last one had ended, mean over steps."""
        times = torch.tensor(self._times, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return 1e3 * (times[:, 1] - times[:, 0]).mean().item()


class Run:
    """One model in training by one method. A seed fixes weights and batches, whatever the method."""

    def __init__(self, task: Task, config: dict, name: str, seed: int):
        torch.manual_seed(seed)
        method = parse_method(name)
        host = KFAC if method.host == KFAC_PYTORCH else method.host
        lr = {**LEARNING_RATES, **LEARNING_RATES_OF_TASK.get(config["task"], {})}[host]
        self.task = task
        self.net = task.build()
        self.model = data_parallel(self.net, config, method, method.host == KFAC)
        self.kfac = make_kfac(self.model, config, method, lr) if method.host == KFAC else None
        self.preconditioner = self.kfac
        if method.host == KFAC_PYTORCH:
            self.preconditioner = make_kfac_pytorch(self.model, config, method, lr)
        if method.host == "adam":
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)
        else:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9, fused=True)  # one pass
        self.batches = task.batches(1000 * seed + dist.get_rank())
        self.backward_s = self.preconditioner_s = 0.0  # in step(), sums over steps
        self.preconditioned_s = 0.0  # when the preconditioner had done its last step

    def backward(self) -> torch.Tensor:
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        return loss

    def step(self) -> tuple[float, float]:
        """This rank's loss, and the seconds the step took."""
        start = time.perf_counter()
        loss = self.backward()
        self.backward_s += time.perf_counter() - start
        if self.preconditioner is not None:
            before = time.perf_counter()
            self.preconditioner.step()
            self.preconditioned_s = time.perf_counter()
            self.preconditioner_s += self.preconditioned_s - before
        self.optimizer.step()
        value = loss.item()
        return value, time.perf_counter() - start


def evaluate(task: Task, net) -> dict:
    net.eval()  # K-FAC's hooks are for training only
    measures = {"validation_loss": task.validation_loss, "validation_accuracy": task.validation_accuracy}
    values = {key: measure(net) for key, measure in measures.items() if measure is not None}
    net.train()
    return values


def train(task: Task, config: dict, name: str, seed: int) -> dict:
    run = Run(task, config, name, seed)
    is_timed = config["timed"] and not config["losses_only"]
    losses, step_s, messages, exchanges = [], [], Messages(), Exchanges()
    initial = {f"initial_{key}": value for key, value in evaluate(task, run.net).items()}
    for step in range(1, config["steps"] + 1):
        loss, seconds = run.step()
        losses.append(loss)
        step_s.append(seconds)
        if run.kfac is not None:
            messages.note(run.kfac)
            exchanges.note(run.kfac, run.preconditioned_s)
        if step % 50 == 0:
            emit("progress", method=name, seed=seed, step=step, loss=loss)
    backward_ms, preconditioner_ms = mean_over_ranks(
        [1e3 * seconds / config["steps"] for seconds in (run.backward_s, run.preconditioner_s)]
    )
    result = {
        **initial,
        **evaluate(task, run.net),
        "losses": [round(x, 4) for x in mean_over_ranks(losses)],
        # Ranks wait for each other in every step; not recorded where other work was going on beside it.
        "step_ms": [round(1e3 * x, 2) for x in mean_over_ranks(step_s)] if is_timed else None,
        "backward_ms": backward_ms if is_timed else None,
        "preconditioner_ms": preconditioner_ms if is_timed else None,
        "replicas_equal": replicas_equal(run.net),
    }
    result["training_loss"] = statistics.mean(result["losses"][-FINAL_STEPS:])
    if run.kfac is not None:
        result["kfac"] = summarize(run.kfac, messages, exchanges if is_timed else None)
    return result


def summarize(kfac, messages: Messages, exchanges: Exchanges | None) -> dict:
    """Bytes of all ranks together, of the last message of each kind and (mean_payload_bytes) of all messages; errors
    are means over messages and over the ranks that sent any. Stages: ms a step, mean over ranks; the exchange of
    preconditioned gradients on the rank that waits least for the others, and its span (Exchanges)."""
    report = kfac.report().to_dict()
    traffic = report["traffic"]
    kinds = sorted(traffic)
    sums = mean_over_ranks([float(traffic[kind][key]) for kind in kinds for key in ("payload_bytes", "dense_bytes")])
    world = dist.get_world_size()
    stage_ms = {stage: ns / report["steps"] / 1e6 for stage, ns in report["time_by_stage_ns"].items()}
    exchange_ms = torch.tensor(sum(stage_ms[stage] for stage in EXCHANGE))
    dist.all_reduce(exchange_ms, dist.ReduceOp.MIN)
    payloads = mean_over_ranks([float(statistics.mean(messages.payload_bytes.get(kind, [0]))) for kind in kinds])
    own = [messages.errors.get(kind) for kind in kinds]
    means = mean_over_ranks([x for e in own for x in (statistics.mean(e) if e else 0.0, float(bool(e)))])
    return {
        "bytes": {kind: [world * sums[2 * i], world * sums[2 * i + 1]] for i, kind in enumerate(kinds)},
        "mean_payload_bytes": {kind: world * payloads[i] for i, kind in enumerate(kinds)},
        "messages": {kind: traffic[kind]["messages"] for kind in kinds},
        "error": {kind: means[2 * i] / means[2 * i + 1] if means[2 * i + 1] else 0.0 for i, kind in enumerate(kinds)},
        "stage_ms": dict(zip(stage_ms, mean_over_ranks(list(stage_ms.values())), strict=True)),
        "exchange_ms": exchange_ms.item(),
        "exchange_span_ms": exchanges.mean_span_ms() if exchanges else None,
        "auto": report.get("auto", {}),
    }


def preconditioned_matrices(run: Run) -> list[torch.Tensor]:
    """Of the last step, the bias as last column."""
    matrices = []
    for layer in run.kfac._layers:
        matrix = [layer.module.weight.grad.flatten(1)]
        if layer.has_bias:
            matrix.append(layer.module.bias.grad[:, None])
        matrices.append(torch.cat(matrix, 1))
    return matrices


def time_exchanges(task: Task, config: dict) -> None:
    """Preconditioned gradients of successive steps to all ranks: by a broadcast a tensor, and in one message a rank.

    The owner of each has it and the others get it; here they have it already, so each gather starts from its own copy.
    """
    run = Run(task, config, KFAC, 0)
    for _ in range(config["exchange_steps"]):
        run.step()
    of_steps = []
    for _ in range(EXCHANGED_STEPS):
        run.step()
        of_steps.append(preconditioned_matrices(run))
    emit("trained")
    while not Path(config["shaped"]).exists():
        time.sleep(0.05)
    owners = [owner for owner, _, _ in run.kfac._core.placements]
    tensors, world = of_steps[0], dist.get_world_size()
    dense = sum(4 * t.numel() for t in tensors)
    shares = [sum(4 * t.numel() for t, o in zip(tensors, owners, strict=True) if o == r) for r in range(world)]
    common = {"task": task.describe, "shares": shares, "tensors": len(tensors)}

    def broadcasts(values):
        for work in [dist.broadcast(t, o, async_op=True) for t, o in zip(values, owners, strict=True)]:
            work.wait()

    uncompressed = {"dense_bytes": dense, "payload_bytes": dense, "error": 0.0, "extra_gathers": 0.0}
    emit("exchange", codec="broadcasts", **time_it(broadcasts, of_steps, config["seconds"]), **uncompressed, **common)
    if config["kfac_pytorch"]:
        communicator = import_kfac_pytorch(config["kfac_pytorch"]).distributed.TorchDistributedCommunicator()

        def theirs(values):
            for future in [communicator.broadcast(t, src=o) for t, o in zip(values, owners, strict=True)]:
                future.wait()

        timed = time_it(theirs, of_steps, config["seconds"])
        emit("exchange", codec="kfac-pytorch's broadcasts", **timed, **uncompressed, **common)
    for name in config["codecs"]:
        method = parse_method(f"{KFAC} + {name}")
        gather = cortado.CompressedAllGather(tensors, owners, method.codec, error_feedback=method.feedback)
        payloads, errors, extra = [], [], []

        def exchange(values, gather=gather):
            gather(values)

        def note(gather=gather, payloads=payloads, errors=errors, extra=extra):
            report = gather.report()
            payloads.append(report["all_payload_bytes"])
            extra.append(report["collectives"] - 1)
            if report["dense_bytes"]:
                errors.append(report["relative_error"])

        timed = time_it(exchange, of_steps, config["seconds"], note)
        report = gather.report()
        error, has_errors = mean_over_ranks([statistics.mean(errors) if errors else 0.0, float(bool(errors))])
        emit(
            "exchange",
            codec=name,
            **timed,
            dense_bytes=report["all_dense_bytes"],
            payload_bytes=statistics.mean(payloads),
            error=error / has_errors,
            extra_gathers=statistics.mean(extra),
            stage_ms={key: report[f"{key}_ns"] / report["steps"] / 1e6 for key in ("encode", "gather", "decode")},
            **common,
        )


def time_it(exchange, of_steps: list, seconds: float, note=lambda: None) -> dict:
    """Median over repetitions of the slowest rank's time, in ms, and their number, the same on all ranks. Each
    repetition takes the tensors of another step; the first ones are not counted: payloads find their sizes."""
    times: list[float] = []
    repetitions = warm_up = 3
    while len(times) < repetitions:
        values = [tensor.clone() for tensor in of_steps[len(times) % len(of_steps)]]
        dist.barrier()
        start = time.perf_counter()
        exchange(values)
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
        if len(times) > warm_up:
            note()
        if len(times) == warm_up:
            repetitions = warm_up + max(5, min(200, int(seconds / times[-1])))
    return {"ms": 1e3 * statistics.median(times[warm_up:]), "repetitions": repetitions - warm_up}


def main() -> None:
    config = start_worker()
    task = TASKS[config["task"]]()
    for method, seed in config["runs"]:
        emit("result", task=task.describe, method=method, seed=seed, **train(task, config, method, seed))
    if config["codecs"]:
        time_exchanges(task, config)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
