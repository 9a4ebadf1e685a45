# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `topology.py`: one process a rank, which exchanges tensors under one plan after the other."""

import os
import time
from pathlib import Path

import cortado
import torch
import torch.distributed as dist
from trainer import emit, start_worker

QUIET_S = 0.4  # before and after what is counted


def sent() -> tuple[int, int]:
    """Bytes and packets that this rank's interface has sent."""
    statistics = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics"
    return tuple(int((statistics / name).read_text()) for name in ("tx_bytes", "tx_packets"))


def sum_over_ranks(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def count(case: int) -> tuple[int, int]:
    dist.barrier()
    time.sleep(QUIET_S)  # acknowledgements have come
    emit("counted", case=case)
    counted = sent()
    time.sleep(QUIET_S)  # the one who started us counts, too
    return counted


def exchange_s(tensors: list[torch.nn.Parameter], reducer: cortado.Reducer, gradient: torch.Tensor) -> float:
    for tensor in tensors:
        tensor.grad = None
    with reducer.no_sync():
        sum((tensor * gradient).sum() for tensor in tensors).backward()
    dist.barrier()
    start = time.perf_counter()
    reducer.wait()
    return time.perf_counter() - start


def main() -> None:
    config = start_worker()
    torch.manual_seed(dist.get_rank())
    messages = config["messages"]
    gradient = torch.randn(config["elems"] // messages)
    for number, case in enumerate(config["cases"]):
        tensors = [torch.nn.Parameter(torch.zeros_like(gradient)) for _ in range(messages)]
        named = [(f"tensor{i}", tensor) for i, tensor in enumerate(tensors)]
        reducer = cortado.Reducer(named, case["plan"], verbose=False)
        exchange_s(tensors, reducer, gradient)
        before = count(number)
        seconds = [exchange_s(tensors, reducer, gradient) for _ in range(config["steps"])]
        after = count(number)
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        per_step = [(b - a) / config["steps"] for a, b in zip(before, after, strict=True)]
        sent_bytes, sent_packets = sum_over_ranks(per_step)
        emit(
            "measured",
            case=number,
            seconds=slowest.tolist(),
            sent_bytes=sent_bytes,
            sent_packets=sent_packets,
            payload_bytes=len(cortado.compress(gradient, case["codec"])),
        )
        reducer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
