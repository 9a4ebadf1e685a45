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
WINDOWS_A_WORKER = 8  # of deep_lm
VALIDATION_BYTES = 8192


@dataclass(frozen=True)
class Task:
    """What to train. `batches(seed)` yields (inputs, targets)."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]
    optimizer: Callable[..., torch.optim.Optimizer]
    describe: str
    # Mean loss on held-out data, which the ranks share out; the same on all of them.
    validation_loss: Callable[[nn.Module], float] | None = None
    # Share of held-out data that is classified rightly, as above.
    validation_accuracy: Callable[[nn.Module], float] | None = None
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = train_lm.cross_entropy


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
    """VGG in small, to be trained to the end: blocks of two 3 x 3 convolutions, two linear layers. With group
    normalisation: without, S-SGD itself stays at chance with some seeds."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        channels = 1
        for width in (32, 64, 128):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
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


def narrow_mlp(depth: int = 24, width: int = 96) -> Task:
    """`depth` layers of width x width between digits and their labels. What K-FAC computes for a layer grows with the
    cube of its width, what it sends with the square: narrow layers leave the larger share of a step to the exchange,
    and of that to what a message costs, however short it is."""

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
        for _ in range(depth):
            layers.append(NarrowBlock(width))
        return nn.Sequential(*layers, nn.Linear(width, 10))

    parameters = depth * width * (width + 1) + 65 * width + 10 * (width + 1)
    return _digits_task(build, f"residual MLP 64-{depth}x{width}-10, {parameters / 1e6:.2f} M parameters")


class NarrowBlock(nn.Module):
    """x + relu(linear(x)) / 4: the depth does not hinder training."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(self.linear(x)) / 4


def deep_lm() -> Task:
    """A byte-level language model over a window of eight bytes: 63 layers of 256 x 256 between an embedding and the
    logits. In this shape most of an uncompressed K-FAC step at 1 Gb/s is the exchange of preconditioned gradients: few
    examples a step, so that forward and backward passes do little more than read the weights; layers narrow enough
    that preconditioning (the cube of the width, the exchange its square) takes a fifth of the exchange, and wide enough
    that calling them does not take longer; no biases, which would double the number of tensors."""
    width, depth, window = 256, 63, 8

    def build() -> nn.Module:
        embedding = nn.Embedding(train_lm.VOCABULARY, width // window)
        head = nn.Linear(width, train_lm.VOCABULARY, bias=False)
        nn.init.normal_(head.weight, std=0.02)
        return nn.Sequential(embedding, nn.Flatten(), *(DeepBlock(width, depth) for _ in range(depth)), head)

    offsets = torch.arange(window + 1)

    def choose(data: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - window, (count, 1), generator=generator)
        chosen = data[starts + offsets].long()
        return chosen[:, :-1], chosen[:, -1]

    def batches(seed: int):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield choose(training, WINDOWS_A_WORKER, generator)

    training, validation = train_lm.read_text()
    inputs, targets = choose(validation, VALIDATION_BYTES, torch.Generator().manual_seed(0))

    def validation_loss(module: nn.Module) -> float:
        held_out = torch.arange(VALIDATION_BYTES)
        return _mean_over(held_out, lambda mine: train_lm.cross_entropy(module(inputs[mine]), targets[mine]))

    return Task(
        build=build,
        batches=batches,
        optimizer=_sgd,
        describe=f"byte-level residual MLP {window}x{width // window}-{depth}x{width}-{train_lm.VOCABULARY}, "
        f"4.2 M parameters, {WINDOWS_A_WORKER} windows of {window} bytes a worker",
        validation_loss=validation_loss,
    )


class DeepBlock(nn.Module):
    """x + relu(linear(x)) / sqrt(depth), without bias."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.scale = depth**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, functional.relu(self.linear(x)), alpha=self.scale)


def autoencoder() -> Task:
    """The deep autoencoder on which K-FAC was introduced (Martens and Grosse 2015), for digits of 64 points: logistic
    units, a code of 30 linear ones, cross-entropy of the points, summed over an image."""
    widths = (64, 512, 256, 128, 30, 128, 256, 512, 64)

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in zip(widths, widths[1:], strict=False):
            layers.append(nn.Linear(inputs, outputs))
            if outputs not in (min(widths), widths[-1]):  # the code is linear; the loss takes logits
                layers.append(nn.Sigmoid())
        model = nn.Sequential(*layers)
        for module in model:
            if isinstance(module, nn.Linear):  # as wide a range as keeps logistic units of this depth from saturating
                nn.init.xavier_uniform_(module.weight, gain=4.0)
                nn.init.zeros_(module.bias)
        return model

    images, _ = train_digits.read_digits()
    held_out, rest = _split(images)

    def loss(logits: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(logits, points, reduction="sum") / len(logits)

    def batches(seed: int):
        return ((chosen, chosen.flatten(1)) for chosen, _ in _image_batches(images[rest], rest)(seed))

    return Task(
        build=build,
        batches=batches,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.003, momentum=0.9),
        describe=f"autoencoder {'-'.join(map(str, widths))}, 0.40 M parameters, 16 digits a worker",
        validation_loss=lambda module: _mean_over(
            held_out, lambda mine: loss(module(images[mine]), images[mine].flatten(1))
        ),
        loss=loss,
    )


def _split(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of held-out images and of the others."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return order[:VALIDATION_IMAGES], order[VALIDATION_IMAGES:]


@torch.no_grad()
def _mean_over(held_out: torch.Tensor, mean_of: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The mean over images of what `mean_of` says of the share of each rank."""
    mine = held_out[dist.get_rank() :: dist.get_world_size()]
    total = (mean_of(mine) * len(mine)).reshape(1)
    dist.all_reduce(total)
    return total.item() / len(held_out)


def _digits_task(build: Callable[[], nn.Module], net: str) -> Task:
    images, labels = train_digits.read_digits()
    held_out, rest = _split(images)

    def validation_loss(module: nn.Module) -> float:
        return _mean_over(held_out, lambda mine: functional.cross_entropy(module(images[mine]), labels[mine]))

    def validation_accuracy(module: nn.Module) -> float:
        return _mean_over(held_out, lambda mine: (module(images[mine]).argmax(1) == labels[mine]).float().mean())

    return Task(
        build=build,
        batches=_image_batches(images[rest], labels[rest]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        describe=f"{net}, 16 digits a worker, SGD 0.05 momentum 0.9",
        validation_loss=validation_loss,
        validation_accuracy=validation_accuracy,
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
    """Four 3 x 3 convolutions (down to 2 x 2 points) and two linear layers: 8.7 M parameters. Initialised as PyTorch
    does: with the variances of He et al. all units of the wide layer were dead after 90 steps, and all gradients 0."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        channels = 1
        for width in (64, "pool", 128, "pool", 256, 512):
            if width == "pool":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
                channels = width
        head = [nn.Flatten(), nn.Linear(2048, 3460), nn.ReLU()]
        return nn.Sequential(*layers, *head, nn.Linear(3460, 10))

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
    "narrow-mlp": narrow_mlp,
    "narrow-mlp-96x32": lambda: narrow_mlp(96, 32),
    "deep-lm": deep_lm,
    "autoencoder": autoencoder,
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
