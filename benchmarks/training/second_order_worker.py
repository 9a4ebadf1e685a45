# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `second_order.py`: trains with and without K-FAC, and times the exchange alone."""

import statistics
import time

import cortado
import torch
import torch.distributed as dist
from models import TASKS, Task, train_lm
from torch.nn.parallel import DistributedDataParallel
from trainer import emit, mean_over_ranks, start_worker

FINAL_STEPS = 10  # the final training loss is the mean of these
KFAC = "kfac"
LR = {"sgd": 0.05, "adam": 1e-3, KFAC: 0.05}


def make_optimizer(method: str, parameters):
    if method == "adam":
        return torch.optim.Adam(parameters, lr=LR["adam"])
    return torch.optim.SGD(parameters, lr=LR["sgd" if method == "sgd" else KFAC], momentum=0.9)


def make_kfac(model, config: dict, method: str):
    """`kfac`, or `kfac + CODEC`, or `kfac + CODEC + feedback`."""
    _, *rest = [part.strip() for part in method.split("+")]
    return cortado.KFAC(
        model,
        strategy=config["strategy"],
        factor_update_steps=config["factor_update_steps"],
        inv_update_steps=config["inv_update_steps"],
        damping=config["damping"],
        lr=LR[KFAC],
        skip_layers=config["skip_layers"],
        compression=rest[0] if rest else "none",
        error_feedback="feedback" in rest[1:],
        verbose=False,
    )


def replicas_equal(model) -> bool:
    digest = torch.stack([p.detach().view(torch.int32).to(torch.int64).sum() for p in model.parameters()])
    low, high = digest.clone(), digest.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return torch.equal(low, high)


def train(task: Task, config: dict, method: str, seed: int) -> tuple[dict, object, object]:
    """(result, model, K-FAC or None). K-FAC averages gradients itself, only to owners; SGD and Adam have DDP."""
    torch.manual_seed(seed)
    net = task.build()
    is_kfac = method.startswith(KFAC)
    model = net if is_kfac else DistributedDataParallel(net)
    kfac = make_kfac(net, config, method) if is_kfac else None
    optimizer = make_optimizer(method, net.parameters())
    batches = task.batches(1000 * seed + dist.get_rank())
    losses, step_s, errors = [], [], []
    initial = task.validation_loss(net)
    for step in range(1, config["steps"] + 1):
        inputs, targets = next(batches)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = train_lm.cross_entropy(model(inputs), targets)
        loss.backward()
        if kfac is not None:
            kfac.step()
            errors.append(kfac.report().to_dict()["traffic"]["gradients"]["relative_error"])
        optimizer.step()
        losses.append(loss.item())
        step_s.append(time.perf_counter() - start)
        if step % 50 == 0:
            emit("progress", method=method, seed=seed, step=step, loss=losses[-1])
    losses = mean_over_ranks(losses)
    result = {
        "initial_validation_loss": initial,
        "validation_loss": task.validation_loss(net),
        "training_loss": statistics.mean(losses[-FINAL_STEPS:]),
        "losses": [round(x, 4) for x in losses],
        "step_ms": 1e3 * statistics.median(step_s),
        "mean_step_ms": 1e3 * statistics.mean(step_s),
        "replicas_equal": replicas_equal(net),
    }
    if kfac is not None:
        result["kfac"] = summarize(kfac, errors)
    return result, net, kfac


def summarize(kfac, errors: list[float]) -> dict:
    """Bytes of all ranks together; the error is the mean over steps and over the ranks that own something."""
    report = kfac.report().to_dict()
    traffic = report["traffic"]
    names = sorted(traffic)
    sums = mean_over_ranks([float(traffic[n][k]) for n in names for k in ("payload_bytes", "dense_bytes")])
    world = dist.get_world_size()
    owns = float(traffic["gradients"]["dense_bytes"] > 0)
    error, owners = mean_over_ranks([statistics.mean(errors) * owns, owns])
    return {
        "bytes": {n: [world * sums[2 * i], world * sums[2 * i + 1]] for i, n in enumerate(names)},
        "messages": {n: traffic[n]["messages"] for n in names},
        "relative_error": error / max(owners, 1e-9),
        "stage_ms": {n: ns / report["steps"] / 1e6 for n, ns in report["time_by_stage_ns"].items()},
        "strategy": report["strategy"],
    }


def time_exchanges(net, kfac, codecs: list[str], seconds: float) -> None:
    """Preconditioned gradients of the last step to all ranks: by a broadcast a tensor, and in one message a rank."""
    placements = kfac._core.placements
    tensors, owners = [], []
    for layer, (owner, _, _) in zip(kfac._layers, placements, strict=True):
        matrix = [layer.module.weight.grad.flatten(1)]
        if layer.has_bias:
            matrix.append(layer.module.bias.grad[:, None])
        tensors.append(torch.cat(matrix, 1))
        owners.append(owner)

    def broadcasts(values):
        for work in [dist.broadcast(t, o, async_op=True) for t, o in zip(values, owners, strict=True)]:
            work.wait()

    dense = sum(4 * t.numel() for t in tensors)
    world = dist.get_world_size()
    shares = [sum(4 * t.numel() for t, o in zip(tensors, owners, strict=True) if o == r) for r in range(world)]
    median_ms = time_it(broadcasts, tensors, seconds)
    emit("exchange", codec="broadcasts", ms=median_ms, dense_bytes=dense, payload_bytes=dense, error=0.0, shares=shares)
    for codec in codecs:
        gather = cortado.CompressedAllGather(tensors, owners, codec)
        median_ms = time_it(gather, tensors, seconds)
        report = gather.report()
        owned = float(report["dense_bytes"] > 0)
        error, owners_share = mean_over_ranks([report["relative_error"] * owned, owned])
        emit(
            "exchange",
            codec=codec,
            ms=median_ms,
            dense_bytes=report["all_dense_bytes"],
            payload_bytes=report["all_payload_bytes"],
            error=error / owners_share,
            shares=shares,
            stage_ms={k: report[f"{k}_ns"] / report["steps"] / 1e6 for k in ("encode", "gather", "decode")},
        )


def time_it(exchange, tensors, seconds: float) -> float:
    """Median over repetitions of the slowest rank's time, in ms; the number of repetitions is the same on all ranks."""
    times = []
    repetitions = 2
    while len(times) < repetitions:
        values = [tensor.clone() for tensor in tensors]
        dist.barrier()
        start = time.perf_counter()
        exchange(values)
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
        if len(times) == 2:
            repetitions = max(5, min(200, int(seconds / times[-1])))
    return 1e3 * statistics.median(times[1:])


def main() -> None:
    config = start_worker()
    task = TASKS[config["task"]]()
    for method, seed in config["runs"]:
        result, _, _ = train(task, config, method, seed)
        emit("result", task=task.describe, method=method, seed=seed, **result)
    if config["codecs"]:
        result, net, kfac = train(task, {**config, "steps": config["exchange_steps"]}, KFAC, 0)
        time_exchanges(net, kfac, config["codecs"], config["seconds"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
