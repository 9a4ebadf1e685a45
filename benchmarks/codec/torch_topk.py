# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""How much faster is topk's encoder than torch.topk?

torch.topk of the magnitudes alone: no abs(), no gathering of values, no coding of positions, all of which the encoder
does. One thread, 2^24 normal fp32 values. Our times are those of build/release/benchmarks/topk_bench (made by
`make bench`), run before and after.
"""

import re
import statistics
import subprocess
import time

import torch

PROGRAM = "build/release/benchmarks/topk_bench"
ELEMS = 1 << 24
ROUNDS = 5
SPECS = {
    density: (f"topk(density={density})", f"topk(density={density}, select=sampled)")
    for density in ("0.001", "0.01", "0.1")
}


def torch_ms(density: float) -> float:
    """Median milliseconds of processor time."""
    magnitudes = torch.randn(ELEMS, generator=torch.Generator().manual_seed(1)).abs()
    kept = int(ELEMS * density)
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        torch.topk(magnitudes, kept, sorted=False)
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def encode_ms() -> dict[str, float]:
    """Milliseconds of processor time for every specification."""
    wanted = "|".join(re.escape(spec) for pair in SPECS.values() for spec in pair)
    table = subprocess.run(
        [PROGRAM, f"--benchmark_filter=^({wanted}) {ELEMS} normal"], check=True, capture_output=True, text=True
    ).stdout
    rows = re.findall(rf"^(topk\(.*\)) +{ELEMS} normal +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)", table, re.MULTILINE)
    if len(rows) != 2 * len(SPECS):
        raise SystemExit(f"expected {2 * len(SPECS)} rows in the output of {PROGRAM}:\n{table}")
    return {spec: float(ms) for spec, ms in rows}


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {ELEMS} normal values, milliseconds of processor time")
    print(f"{'density':>7}  {'torch.topk':>10}  {'exact':>7}  {'sampled':>7}  {'exact':>7}  {'sampled':>7}")
    before = encode_ms()
    reference = {density: torch_ms(float(density)) for density in SPECS}
    after = encode_ms()
    for density, pair in SPECS.items():
        exact, sampled = (statistics.mean((before[spec], after[spec])) for spec in pair)
        slow = reference[density]
        print(f"{density:>7}  {slow:10.1f}  {exact:7.2f}  {sampled:7.2f}  {slow / exact:6.1f}x  {slow / sampled:6.1f}x")


if __name__ == "__main__":
    main()
