# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Writes real gradients of the examples as .npy files, for `cortado codec bench` and the codec benchmarks.

    python benchmarks/codec/capture.py gradients
    python benchmarks/codec/capture.py gradients --models digits --steps 100

Trains each example on one worker, by itself, and saves the gradient of every parameter, float32 and in
the parameter's shape, at an early (one tenth), the middle and the last step, as
gradients/gpt-early-blocks.0.qkv.weight.npy. Weights and batches are fixed by the seed, so two runs on
one machine give equal files.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import train_digits
import train_lm


def gpt(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[tuple]]:
    """The model, optimiser and batches of examples/train_lm.py."""
    model = train_lm.GPT()
    training, _ = train_lm.read_text()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4), train_lm.batches(training, seed)


def digits(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[tuple]]:
    """The same of examples/train_digits.py."""
    model = train_digits.small_net()
    images, labels = train_digits.read_digits()
    generator = torch.Generator().manual_seed(seed)

    def batches():
        while True:
            chosen = torch.randint(len(images), (train_digits.BATCH,), generator=generator)
            yield images[chosen], labels[chosen]

    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches()


MODELS = {"gpt": gpt, "digits": digits}


def capture(name: str, steps: int, seed: int, folder: Path) -> int:
    """Trains one model and returns how many files it wrote."""
    torch.manual_seed(seed)
    model, optimizer, stream = MODELS[name](seed)
    moments = {max(1, steps // 10): "early", max(1, steps // 2): "middle", steps: "late"}
    written = 0
    for step in range(1, steps + 1):
        inputs, targets = next(stream)
        optimizer.zero_grad()
        loss = train_lm.cross_entropy(model(inputs), targets)
        loss.backward()
        if step in moments:
            for parameter_name, parameter in model.named_parameters():
                numpy.save(folder / f"{name}-{moments[step]}-{parameter_name}.npy", parameter.grad.numpy())
                written += 1
            print(f"{name}: {moments[step]}, step {step}, loss {loss.item():.3f}", flush=True)
        optimizer.step()
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="made if it is not there; some 140 MB of files")
    parser.add_argument("--models", default=",".join(MODELS), help="separated by ',' (default: all)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]}; known are {', '.join(MODELS)}")
    if options.steps < 3:
        parser.error("at least 3 steps are needed")
    options.folder.mkdir(parents=True, exist_ok=True)
    written = sum(capture(name, options.steps, options.seed, options.folder) for name in names)
    print(f"wrote {written} files to {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
