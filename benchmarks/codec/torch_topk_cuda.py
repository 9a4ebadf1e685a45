# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What torch.topk takes on a CUDA device, for the same values as those of cuda_codec_bench. Rows are CSV.

    python benchmarks/codec/torch_topk_cuda.py build/gpu/benchmarks/cuda_codec_bench [MiB of values, 256]

torch.topk of the magnitudes alone: no abs(), no gathering of values, no coding of positions, all of which the encoder
does.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

WARM_UP, RUNS = 5, 40
DENSITY = 0.01


def microseconds(call: Callable[[], object]) -> list[float]:
    """Times of a call on the current stream, between events around each."""
    times = []
    for run in range(WARM_UP + RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if run >= WARM_UP:
            times.append(begin.elapsed_time(end) * 1e3)
    return times


def values_of(bench: str, mebibytes: int) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "values"
        subprocess.run([bench, "--values", file, str(mebibytes)], check=True)
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)


def check(magnitudes: torch.Tensor, chosen: torch.Tensor) -> None:
    """The kept magnitudes are the largest."""
    least = chosen.min()
    if (magnitudes > least).sum() > len(chosen) or (magnitudes >= least).sum() < len(chosen):
        raise SystemExit("torch.topk did not keep the largest magnitudes")


def main() -> int:
    bench, mebibytes = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 256
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    magnitudes = values_of(bench, mebibytes).cuda().abs()
    kept = int(len(magnitudes) * DENSITY)
    print("what,values,kept,median_us,slowest_us")
    for what, is_sorted in (("torch.topk", False), ("torch.topk sorted", True)):
        check(magnitudes, torch.topk(magnitudes, kept, sorted=is_sorted).values)
        times = microseconds(lambda is_sorted=is_sorted: torch.topk(magnitudes, kept, sorted=is_sorted))
        print(f"{what},{len(magnitudes)},{kept},{statistics.median(times):.1f},{max(times):.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
