# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""How much faster are the elementwise codecs than the torch operations that do the same?

The references are what PyTorch's own hooks run (fp16_compress_hook and bf16_compress_hook cast there and back;
quantization_perchannel_hook rounds by rows), torch.quantize_per_tensor, casts to torch.float8 with a scale for each
block, and the usual operations for signs and 4-bit codes. One thread, 2^24 normal fp32 values, processor time, memory
that is there before the clock starts where the operation can write to it. Our times are those of
build/release/benchmarks/elementwise_bench (made by `make bench`), run before and after.
"""

import re
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

PROGRAM = "build/release/benchmarks/elementwise_bench"
ELEMS = 1 << 24
ROUNDS = 5
BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


class Reference(NamedTuple):
    name: str
    spec: str  # ours
    encode: Callable  # values -> payload
    decode: Callable  # payload, output


def cast(dtype: torch.dtype) -> tuple[Callable, Callable]:
    narrow = torch.empty(ELEMS, dtype=dtype)
    return narrow.copy_, lambda payload, output: output.copy_(payload)


def encode_fp8(values, dtype, block=256):
    """A power of two for each block, as ours."""
    rows = values.view(-1, block)
    scales = torch.exp2(torch.ceil(torch.log2(rows.abs().amax(1, keepdim=True) / torch.finfo(dtype).max)))
    return (rows / scales).to(dtype), scales


def decode_fp8(payload, output):
    codes, scales = payload
    torch.mul(codes.to(torch.float32), scales, out=output.view(codes.shape))


def encode_sign(values):
    return (values < 0).view(-1, 8).to(torch.uint8).mul_(BITS).sum(1, dtype=torch.uint8), values.abs().mean()


def decode_sign(payload, output):
    codes, scale = payload
    is_negative = codes.unsqueeze(1).bitwise_and(BITS).ne(0).view(-1)
    torch.where(is_negative, -scale, scale, out=output)


def encode_per_tensor(values):
    low, high = torch.aminmax(values)
    scale = torch.maximum(-low, high) / 127
    return torch.quantize_per_tensor(values, scale, torch.tensor(0), torch.qint8)


def encode_per_channel(values, block=512):
    """quantization_perchannel_hook: affine, its bucket_size of 512."""
    rows = values.view(-1, block)
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    scales = (high - low) / 255
    zeros = torch.round(-low / scales)
    return torch.round(rows / scales + zeros).clamp_(0, 255).to(torch.uint8), scales, zeros


def decode_per_channel(payload, output):
    codes, scales, zeros = payload
    torch.mul(codes.to(torch.float32).sub_(zeros), scales, out=output.view(codes.shape))


def encode_4_bits(values, block=256, stochastic=False):
    """Two codes a byte, one scale a block."""
    rows = values.view(-1, block)
    scales = rows.abs().amax(1, keepdim=True) / 7
    levels = rows / scales
    levels = levels.add_(torch.rand_like(levels)).floor_() if stochastic else levels.round_()
    codes = levels.clamp_(-7, 7).add_(8).to(torch.uint8).view(-1, 2)
    return codes[:, 0] | (codes[:, 1] << 4), scales, block


def decode_4_bits(payload, output):
    codes, scales, block = payload
    levels = torch.stack((codes & 15, codes >> 4), 1).view(-1, block).to(torch.float32).sub_(8)
    torch.mul(levels, scales, out=output.view(-1, block))


REFERENCES = [
    Reference("bf16_compress_hook", "cast(bf16)", *cast(torch.bfloat16)),
    Reference("fp16_compress_hook", "cast(fp16)", *cast(torch.float16)),
    Reference("float8_e4m3fn, blocks of 256", "fp8(e4m3)", lambda v: encode_fp8(v, torch.float8_e4m3fn), decode_fp8),
    Reference("float8_e5m2, blocks of 256", "fp8(e5m2)", lambda v: encode_fp8(v, torch.float8_e5m2), decode_fp8),
    Reference("signs, mean magnitude", "sign", encode_sign, decode_sign),
    Reference(
        "quantize_per_tensor, int8",
        "quant(8, block=tensor)",
        encode_per_tensor,
        lambda payload, output: output.copy_(payload.dequantize()),
    ),
    Reference("quantization_perchannel_hook", "quant(8)", encode_per_channel, decode_per_channel),
    Reference("4 bits, blocks of 256", "quant(4)", encode_4_bits, decode_4_bits),
    Reference(
        "4 bits, stochastic",
        "quant(4, round=stochastic)",
        lambda values: encode_4_bits(values, stochastic=True),
        decode_4_bits,
    ),
]


def torch_ms(reference: Reference, values: torch.Tensor) -> tuple[float, float, float]:
    """Median milliseconds of processor time of encode and decode, and the relative L2 error."""
    output = torch.empty(ELEMS)
    times = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        payload = reference.encode(values)
        middle = time.process_time()
        reference.decode(payload, output)
        times.append(((middle - start) * 1e3, (time.process_time() - middle) * 1e3))
    error = (torch.linalg.vector_norm(output - values) / torch.linalg.vector_norm(values)).item()
    return *(statistics.median(part) for part in zip(*times[1:], strict=True)), error


def codec_ms() -> dict[str, tuple[float, float, float]]:
    """As torch_ms(), by specification."""
    specs = {reference.spec for reference in REFERENCES}
    wanted = "|".join(re.escape(spec) for spec in specs)
    command = [PROGRAM, f"--benchmark_filter=^({wanted}) fp32$"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = re.findall(r"^(.*?) +fp32 +[\d.]+ +([\d.]+) +[\d.]+ +([\d.]+) +\d+% +([\d.]+) +\d+%", table, re.MULTILINE)
    if {spec for spec, *_ in rows} != specs:
        raise SystemExit(f"expected a row for each of {sorted(specs)} in the output of {PROGRAM}:\n{table}")
    return {spec: (float(encode), float(decode), float(error)) for spec, error, encode, decode in rows}


def main() -> None:
    torch.set_num_threads(1)
    values = torch.randn(ELEMS, generator=torch.Generator().manual_seed(1))
    before = codec_ms()
    theirs = [torch_ms(reference, values) for reference in REFERENCES]
    after = codec_ms()
    print(f"torch {torch.__version__}, one thread, {ELEMS} normal fp32 values, milliseconds of processor time")
    head = f"{'encode':>8}{'decode':>8}{'error':>9}"
    print(f"{'':30}{head}   {'':27}{head}")
    for reference, times in zip(REFERENCES, theirs, strict=True):
        ours = [statistics.mean(pair) for pair in zip(before[reference.spec], after[reference.spec], strict=True)]
        print(
            f"{reference.name:30}{times[0]:8.1f}{times[1]:8.1f}{times[2]:9.5f}   "
            f"{reference.spec:27}{ours[0]:8.2f}{ours[1]:8.2f}{ours[2]:9.5f}  "
            f"encode {times[0] / ours[0]:5.1f}x  decode {times[1] / ours[1]:5.1f}x"
        )


if __name__ == "__main__":
    main()
