# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""How much faster is compso's encoder than the same quantisation in torch operations followed by zstd -1?

One thread, the same 25 M normal fp32 values, bound and filter 4e-3, stochastic rounding; the operations work in place
where they can. Our times are those of build/release/benchmarks/compso_bench (made by `make bench`), run before and
after.
"""

import ctypes
import ctypes.util
import re
import statistics
import subprocess
import tempfile
import time

import numpy
import torch

PROGRAM = "build/release/benchmarks/compso_bench"
ELEMS = 25_000_000
BOUND = 4e-3
ROUNDS = 3


def quantise(values: torch.Tensor) -> torch.Tensor:
    """The codes, a byte each, of level 0 at 128."""
    low, high = torch.aminmax(values)
    width = high - low
    kept = values.abs().gt_(BOUND * width)
    quotients = (values * kept).mul_(1 / (BOUND * width))
    levels = quotients.floor()
    quotients.sub_(levels)
    levels.add_(torch.rand_like(quotients).lt_(quotients))
    return levels.add_(128).to(torch.uint8)


def zstd(codes: numpy.ndarray) -> int:
    """The bytes that zstd -1 makes of the codes."""
    library = ctypes.CDLL(ctypes.util.find_library("zstd") or "libzstd.so.1")
    for function in (library.ZSTD_compressBound, library.ZSTD_compress):
        function.restype = ctypes.c_size_t
    room = numpy.empty(library.ZSTD_compressBound(ctypes.c_size_t(codes.nbytes)), numpy.uint8)
    to, source = ctypes.c_void_p(room.ctypes.data), ctypes.c_void_p(codes.ctypes.data)
    return library.ZSTD_compress(to, ctypes.c_size_t(room.nbytes), source, ctypes.c_size_t(codes.nbytes), 1)


def torch_ms(values: torch.Tensor) -> tuple[float, float, float]:
    """Median milliseconds of processor time, of both parts, and the ratio."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        codes = quantise(values)
        middle = time.process_time()
        compressed_bytes = zstd(codes.numpy())
        times.append(((middle - start) * 1e3, (time.process_time() - middle) * 1e3))
    return *(statistics.median(part) for part in zip(*times, strict=True)), 4 * ELEMS / compressed_bytes


def compso_ms(folder: str) -> tuple[float, float]:
    """Milliseconds of processor time, and the ratio."""
    command = [PROGRAM, folder, "--benchmark_filter=^normal"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row = re.search(r"^compso +([\d.]+) +([\d.]+)", table, re.MULTILINE)
    if not row:
        raise SystemExit(f"no row of compso in the output of {PROGRAM}:\n{table}")
    return float(row[2]), float(row[1])


def main() -> None:
    torch.set_num_threads(1)
    values = torch.randn(ELEMS, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        numpy.save(f"{folder}/normal-torch-values.npy", values.numpy())  # as capture.py names its files
        before, ratio = compso_ms(folder)
        quantise_ms, zstd_ms, torch_ratio = torch_ms(values)
        ours = statistics.mean((before, compso_ms(folder)[0]))
    theirs = quantise_ms + zstd_ms
    print(f"torch {torch.__version__}, one thread, {ELEMS} normal values, milliseconds of processor time")
    print(f"torch operations {quantise_ms:.1f} + zstd -1 {zstd_ms:.1f} = {theirs:.1f}, ratio {torch_ratio:.2f}")
    print(f"compso           {ours:.1f}, ratio {ratio:.2f}: {theirs / ours:.1f}x")


if __name__ == "__main__":
    main()
