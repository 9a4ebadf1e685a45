# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""How much faster is the fused low-rank pass than the same in PyTorch operations?

The unfused sequence for one factor: add the residual, multiply, multiply back, subtract; one thread, 4096 x 4096 fp32.
The fused passes are those of build/release/benchmarks/lowrank_bench (made by `make bench`), run before and after it.
"""

import re
import statistics
import subprocess
import time

import torch

PROGRAM = "build/release/benchmarks/lowrank_bench"
ROWS = COLS = 4096
ROUNDS = 7


def unfused_ms(rank: int) -> float:
    """Median milliseconds of one P-step in PyTorch operations."""
    generator = torch.Generator().manual_seed(rank)
    gradient, residual = (torch.randn(ROWS, COLS, generator=generator) for _ in range(2))
    basis = torch.linalg.qr(torch.randn(COLS, rank, generator=generator)).Q
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        total = gradient + residual
        factor = total @ basis
        residual = total - factor @ basis.t()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def fused_ms(rank: int) -> tuple[float, float]:
    """Milliseconds of the P-step and the Q-step, out of cache."""
    table = subprocess.run(
        [PROGRAM, f"--benchmark_filter=out of cache {ROWS}x{COLS} rank {rank}$"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for line in table.splitlines():
        found = re.match(rf"out of cache +{ROWS} x {COLS} +{rank} +[\d.]+ +([\d.]+) +[\d.]+ +\d+% +([\d.]+)", line)
        if found:
            return float(found[1]), float(found[2])
    raise SystemExit(f"no row for rank {rank} in the output of {PROGRAM}:\n{table}")


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {ROWS} x {COLS}, milliseconds of processor time")
    print(f"{'rank':>4}  {'PyTorch':>8}  {'P-step':>7}  {'Q-step':>7}  {'faster P':>8}  {'faster Q':>8}")
    for rank in (4, 32):
        before = fused_ms(rank)
        unfused = unfused_ms(rank)
        p, q = (statistics.mean(pair) for pair in zip(before, fused_ms(rank), strict=True))
        print(f"{rank:>4}  {unfused:8.1f}  {p:7.1f}  {q:7.1f}  {unfused / p:7.1f}x  {unfused / q:7.1f}x")


if __name__ == "__main__":
    main()
