# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level GPT (10.9 M parameters) on real text, gradients compressed by Cortado.

    torchrun --nproc-per-node 4 examples/train_lm.py
    torchrun --nproc-per-node 4 examples/train_lm.py --method "acp(rank=8)" --text ~/books
    torchrun --nproc-per-node 4 examples/train_lm.py --method ddp

`--method` is any Cortado codec string, `ddp` for PyTorch's own all-reduce, or `bf16`, `fp16` or
`powersgd(rank=4)` for the other baselines of benchmarks/training. A job of your own needs the two
lines marked "Cortado" and nothing else.
"""

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 256  # bytes
CONTEXT = 64  # tokens
BATCH = 2  # sequences a worker and step
BASELINES = ("ddp", "bf16", "fp16", "powersgd")


class Block(nn.Module):
    """Attention, then a feed-forward layer, each behind its own layer norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Maps bytes (batch, length) to the logits of the next byte (batch, length, 256)."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x):
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text(folder: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes (95 and 5 per cent): every file of a folder, in a fixed order.

    Without a folder: the Python sources of the running interpreter's standard library.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*" if folder else "*.py") if f.is_file())
    if not folder:
        skip = {"site-packages", "dist-packages", "test", "tests"}
        files = [f for f in files if not skip & set(f.relative_to(root).parts)]
    text = b"".join(f.read_bytes() for f in files)
    if len(text) < 100 * CONTEXT:
        raise SystemExit(f"{root}: {len(text)} bytes of text; at least {100 * CONTEXT} are needed")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    split = int(len(data) * 0.95)
    return data[:split], data[split:]


def batches(data: torch.Tensor, seed: int, batch: int = BATCH) -> Iterator[tuple]:
    """Endless random windows of `data`: the bytes, and the bytes that follow them."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(data) - CONTEXT, (batch, 1), generator=generator)
        window = data[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]


def cross_entropy(logits, targets):
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, data: torch.Tensor, rank: int, world: int, windows: int = 64) -> float:
    """Mean loss over windows of `data` that are the same in every run, shared out among the ranks."""
    inputs, targets = next(batches(data, seed=0, batch=windows))
    mine, expected = inputs[rank::world], targets[rank::world]
    total = torch.zeros(1)
    if len(mine) > 0:  # there may be more ranks than windows
        total += len(mine) * cross_entropy(model(mine), expected)
    dist.all_reduce(total)
    return total.item() / windows


def data_parallel(model: nn.Module, method: str) -> DistributedDataParallel:
    """The model under DDP; with Cortado unless `method` names a baseline to compare with."""
    if method.partition("(")[0] in BASELINES:
        sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks" / "training"))
        from methods import wrap

        return wrap(model, method).ddp
    import cortado

    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    cortado.attach(ddp, method)  # Cortado: before the first step
    return ddp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="acp(rank=4)", help="how the gradients travel")
    parser.add_argument("--text", help="folder with text (default: the standard library's sources)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 29500)):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(arguments.seed)  # the same initial weights for every method
    model = GPT()
    ddp = data_parallel(model, arguments.method)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4)
    training, validation = read_text(arguments.text)
    stream = batches(training, seed=1000 * arguments.seed + rank)
    start = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        inputs, targets = next(stream)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 20 == 0 or step == arguments.steps):
            step_ms = (time.perf_counter() - start) / step * 1e3
            print(f"step {step:5}  loss {loss.item():.3f}  {step_ms:.0f} ms a step", flush=True)
    loss = validation_loss(model, validation, rank, world)
    if rank == 0:
        print(f"validation loss {loss:.3f} after {arguments.steps} steps")
        if "cortado" in sys.modules:
            print(sys.modules["cortado"].report(ddp))  # Cortado: bytes, error, time by stage
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
