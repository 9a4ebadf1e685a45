# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What the step of cuda_acp_step_bench is held against, on the same model: a backward pass in bf16, and what
PyTorch's PowerSGD hook takes for the gradients. Rows are CSV.

    python benchmarks/codec/torch_acp_step_cuda.py

GPT of 24 blocks of width 1024, a vocabulary of 50,257 tied to the head, a context of 1024: 355 M parameters in fp32,
bf16 by autocast. The hook gets buckets as DDP makes them (25 MiB) in a group of one rank, so that nothing travels; both
of its forms are timed.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.nn import functional
from torch_topk_cuda import microseconds

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from train_lm import Block  # noqa: E402

VOCABULARY, CONTEXT, BLOCKS, WIDTH, HEADS = 50257, 1024, 24, 1024, 16
BATCHES = (8, 16, 32)  # sequences of CONTEXT tokens
BUCKET_BYTES = 25 * 2**20
RANK = 4


class GPT(nn.Module):
    def __init__(self, vocabulary=VOCABULARY, context=CONTEXT, blocks=BLOCKS, width=WIDTH, heads=HEADS):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


@dataclass
class Bucket:
    """What the hook asks of DDP's buckets."""

    number: int
    last: bool
    flat: torch.Tensor
    pieces: list[torch.Tensor]

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return self.pieces


def buckets_of(shapes: list[torch.Size], device: str) -> list[Bucket]:
    """The last parameters first, as the backward pass has them; normal values."""
    groups: list[list[torch.Size]] = [[]]
    filled = 0
    for shape in reversed(shapes):
        if filled and filled + 4 * shape.numel() > BUCKET_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(shape)
        filled += 4 * shape.numel()
    buckets = []
    for number, group in enumerate(groups):
        flat = torch.randn(sum(shape.numel() for shape in group), device=device)
        split = flat.split([shape.numel() for shape in group])
        pieces = [piece.view(shape) for piece, shape in zip(split, group, strict=True)]
        buckets.append(Bucket(number, number == len(groups) - 1, flat, pieces))
    return buckets


class PowerStep:
    """All buckets through the hook, in order; then each is waited for, as DDP does at the end."""

    def __init__(self, shapes: list[torch.Size], device: str, batched: bool):
        settings = {"min_compression_rate": 1, "start_powerSGD_iter": 2, "batch_tensors_with_same_shape": batched}
        self.state = torch_power.PowerSGDState(None, matrix_approximation_rank=RANK, **settings)
        self.buckets = buckets_of(shapes, device)

    def __call__(self) -> None:
        for future in [torch_power.powerSGD_hook(self.state, bucket) for bucket in self.buckets]:
            future.wait()

    def check(self) -> None:
        """After the dense steps at the start, what a matrix becomes is of the rank."""
        for _ in range(3):
            self()
        for bucket in self.buckets:
            for piece in bucket.gradients():
                if piece.dim() > 1 and min(piece.shape) > 4 * RANK:
                    values = torch.linalg.svdvals(piece[: 4 * RANK].double())
                    if not values.isfinite().all() or values[RANK] > 1e-4 * values[0]:
                        raise SystemExit(f"PowerSGD's hook left {tuple(piece.shape)} with a rank above {RANK}")
                    return
        raise SystemExit("PowerSGD's hook had no matrix to compress")


def row(what: str, elems: int, tokens: int | str, times: list[float]) -> None:
    print(f"{what},{elems},{tokens},{statistics.median(times):.1f},{max(times):.1f}", flush=True)


def time_backward(model: GPT, elems: int, batch: int) -> None:
    tokens = torch.randint(VOCABULARY, (batch, CONTEXT + 1), device="cuda")

    def loss():
        model.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    times = []
    for run in range(3 + 10):
        value = loss()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        value.backward()
        end.record()
        end.synchronize()
        if not value.isfinite():
            raise SystemExit("the loss is not finite")
        if run >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    row("backward", elems, batch * CONTEXT, times)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    torch.manual_seed(0)
    model = GPT().cuda()
    shapes = [parameter.shape for parameter in model.parameters()]
    elems = sum(shape.numel() for shape in shapes if len(shape) > 1)
    print("what,elems,tokens,median_us,slowest_us")
    for batch in BATCHES:
        try:
            time_backward(model, elems, batch)
        except torch.OutOfMemoryError:
            print(f"{batch} sequences do not fit into the device's memory", file=sys.stderr)
            break
    del model
    torch.cuda.empty_cache()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for batched in (False, True):
        step = PowerStep(shapes, "cuda", batched)
        step.check()
        row("powersgd batched hook" if batched else "powersgd hook", elems, "", microseconds(step))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
