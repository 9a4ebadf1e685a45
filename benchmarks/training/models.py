# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The models that are measured, each with its data, loss and optimiser."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import train_digits
import train_lm

IMAGES_A_WORKER = 16
VALIDATION_WINDOWS = 256
VALIDATION_IMAGES = 360


@dataclass(frozen=True)
class Task:
    """What to train. `batches(seed)` yields (inputs, targets); the loss is the cross-entropy."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]
    optimizer: Callable[..., torch.optim.Optimizer]
    describe: str
    # Mean loss on held-out data, which the ranks share out; the same on all of them.
    validation_loss: Callable[[nn.Module], float] | None = None


def gpt(windows: int = train_lm.BATCH) -> Task:
    """`windows` of text a worker and step."""
    training, validation = train_lm.read_text()

    def validation_loss(module: nn.Module) -> float:
        return train_lm.validation_loss(module, validation, dist.get_rank(), dist.get_world_size(), VALIDATION_WINDOWS)

    return Task(
        build=train_lm.GPT,
        batches=lambda seed: train_lm.batches(training, seed, windows),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        describe=f"byte-level GPT, 10.9 M parameters, {windows} x 64 tokens a worker, AdamW 3e-4",
        validation_loss=validation_loss,
    )


def digits() -> Task:
    """The net of examples/train_digits.py."""
    return _digits_task(train_digits.small_net, "small convolutional net, 0.36 M parameters")


def vgg_digits() -> Task:
    """VGG in small, to be trained to the end: blocks of two 3 x 3 convolutions, two linear layers."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        channels = 1
        for width in (32, 64, 128):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))

    return _digits_task(build, "VGG-like net (6 convolutions), 0.32 M parameters")


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
        )
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet_digits() -> Task:
    """ResNet in small, with group instead of batch normalisation."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            Residual(32, 32, 1),
            Residual(32, 64, 2),
            Residual(64, 128, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    return _digits_task(build, "ResNet-like net (3 blocks), 0.31 M parameters")


def _digits_task(build: Callable[[], nn.Module], net: str) -> Task:
    images, labels = train_digits.read_digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:VALIDATION_IMAGES], order[VALIDATION_IMAGES:]

    @torch.no_grad()
    def validation_loss(module: nn.Module) -> float:
        mine = held_out[dist.get_rank() :: dist.get_world_size()]
        loss = functional.cross_entropy(module(images[mine]), labels[mine], reduction="sum").reshape(1)
        dist.all_reduce(loss)
        return loss.item() / len(held_out)

    return Task(
        build=build,
        batches=_image_batches(images[rest], labels[rest]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        describe=f"{net}, 16 digits a worker, SGD 0.05 momentum 0.9",
        validation_loss=validation_loss,
    )


def mlp() -> Task:
    """784 inputs (the digits, enlarged), 1024 wide, six 1024 x 1024 layers: 7.1 M parameters."""

    def build() -> nn.Module:
        layers = [nn.Flatten(), nn.Linear(784, 1024), nn.ReLU()]
        for _ in range(6):
            layers += [nn.Linear(1024, 1024), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1024, 10))

    images, labels = train_digits.read_digits()
    images = functional.interpolate(images, size=(28, 28), mode="bilinear")
    describe = "MLP 784-1024-6x1024-10, 7.1 M parameters, 16 digits a worker, SGD 0.02 momentum 0.9"
    return Task(build, _image_batches(images, labels), _sgd, describe)


def vgg() -> Task:
    """Four 3 x 3 convolutions (down to 2 x 2 points) and two linear layers: 8.7 M parameters."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        channels = 1
        for width in (64, "pool", 128, "pool", 256, 512):
            if width == "pool":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
        head = [nn.Flatten(), nn.Linear(2048, 3460), nn.ReLU()]
        model = nn.Sequential(*layers, *head, nn.Linear(3460, 10))
        for module in model:
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        return model

    describe = "small VGG (4 convolutions), 8.7 M parameters, 16 digits a worker, SGD 0.02 momentum 0.9"
    return Task(build, _image_batches(*train_digits.read_digits()), _sgd, describe)


TASKS = {
    "gpt": gpt,
    "gpt-1": lambda: gpt(1),
    "gpt-4": lambda: gpt(4),
    "gpt-8": lambda: gpt(8),
    "digits": digits,
    "vgg-digits": vgg_digits,
    "resnet-digits": resnet_digits,
    "mlp": mlp,
    "vgg": vgg,
}


def _sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def _image_batches(images: torch.Tensor, labels: torch.Tensor):
    def batches(seed: int):
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(images), (IMAGES_A_WORKER,), generator=generator)
            yield images[chosen], labels[chosen]

    return batches
