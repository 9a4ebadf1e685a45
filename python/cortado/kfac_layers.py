# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Which layers of a model K-FAC preconditions, and how they look to the C++ side."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .errors import MismatchError, SpecError
from .group import DTYPE_CODES

MOST_FACTOR_ROWS = 32764  # kMaxMatrixDim of core/linalg.h

_REASONS = {
    torch.nn.Embedding: "its inputs are indices: the factor would be vocabulary x vocabulary",
    torch.nn.EmbeddingBag: "its inputs are indices: the factor would be vocabulary x vocabulary",
    torch.nn.Conv3d: "convolutions over three dimensions are not supported",
    torch.nn.ConvTranspose1d: "transposed convolutions are not supported",
    torch.nn.ConvTranspose2d: "transposed convolutions are not supported",
    torch.nn.ConvTranspose3d: "transposed convolutions are not supported",
    torch.nn.Bilinear: "bilinear layers are not supported",
    torch.nn.MultiheadAttention: "its projections are not layers that are called",
}


@dataclass
class Layer:
    """A layer that is preconditioned."""

    name: str
    module: torch.nn.Module

    def __post_init__(self):
        module = self.module
        self.is_convolution = not isinstance(module, torch.nn.Linear)
        self.has_bias = _trains_bias(module)
        self.groups = module.groups if self.is_convolution else 1
        self.shape = tuple(module.weight.shape)
        self.outputs = self.shape[0] // self.groups
        self.inputs = module.weight[0].numel()
        self._padding = _padding_of(module) if self.is_convolution else []

    @property
    def parameters(self):
        found = [self.module.weight, self.module.bias if self.has_bias else None]
        return [parameter for parameter in found if parameter is not None]

    @property
    def is_trained(self):
        """Not once its weight was frozen or is computed from others: the C++ side gets no gradient of it then."""
        weight = self.module._parameters.get("weight")
        return weight is not None and weight.requires_grad

    def check_parameters(self):
        """That they are as they were: the C++ side has only their addresses."""
        kept = {"weight": self.shape, "bias": self.shape[:1]} if self.has_bias else {"weight": self.shape}
        for name, shape in kept.items():
            parameter = getattr(self.module, name)
            found = None if parameter is None else tuple(parameter.shape)
            if found != shape:
                self._refuse_change(f"a {name} of shape {shape}, now {found}")

    def dtype_code(self, gradients):
        """The one of all gradients."""
        found = list(dict.fromkeys(gradient.dtype for gradient in gradients))
        if len(found) > 1 or found[0] not in DTYPE_CODES:
            raise SpecError(
                f"layer {self.name}: gradients of its parameters must be all float32, all float16 or all bfloat16, got "
                f"{' and '.join(map(str, found))}: convert the whole layer, before KFAC is made"
            )
        return DTYPE_CODES[found[0]]

    def to_core(self):
        """The tuple that _core.Kfac takes."""
        windows = None
        if self.is_convolution:
            pads = self._padding if self.module.padding_mode == "zeros" else [(0, 0)] * len(self._padding)
            sizes = (self.module.kernel_size, self.module.stride, self.module.dilation)
            windows = [(*each, *pad) for *each, pad in zip(*sizes, pads, strict=True)]
            windows = [(1, 1, 1, 0, 0)] * (2 - len(windows)) + windows
        return (self.name, self.inputs, self.outputs, self.has_bias, self.groups, windows)

    def activations(self, inputs):
        """Dense memory for the C++ side: (tensor, rows or images, height, width)."""
        if self.is_convolution and self.module.padding_mode != "zeros":
            flat = [size for pad in reversed(self._padding) for size in pad]
            inputs = F.pad(inputs, flat, mode=self.module.padding_mode)
        return self._batch(inputs, self.shape[1] * self.groups, "inputs")

    def output_gradients(self, gradients):
        return self._batch(gradients, self.shape[0], "outputs")

    def _batch(self, values, channels, what):
        values = values.detach()
        if values.dtype not in DTYPE_CODES:
            values = values.float()
        if not self.is_convolution:
            if values.shape[-1] != channels:
                self._refuse_change(f"{channels} {what}, now a tensor of shape {tuple(values.shape)}")
            values = values.reshape(-1, channels).contiguous()
            return values, values.shape[0], 1, 1
        spatial = len(self.module.kernel_size)
        if values.dim() == spatial + 1:  # one image without a batch
            values = values.unsqueeze(0)
        if values.shape[1] != channels:
            self._refuse_change(f"{what} of {channels} channels, now of shape {tuple(values.shape)}")
        values = values.contiguous()
        height, width = (1, *values.shape[2:])[-2:]
        return values, values.shape[0], height, width

    def _refuse_change(self, what):
        text = f"layer {self.name} had {what}: make a new KFAC after layers have changed (and detach() this one)"
        raise MismatchError(text)

    def __str__(self):
        bias = " + bias" if self.has_bias else ""
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"{self.name} ({self.inputs}{bias} -> {self.outputs}{groups})"


def find_layers(model, skip_layers):
    """(layers to precondition, {name: reason} of those that have parameters but are left alone)."""
    if not isinstance(skip_layers, Iterable):
        raise SpecError(f"skip_layers must be regular expressions of names, got {skip_layers!r}")
    patterns = [_pattern(text) for text in ([skip_layers] if isinstance(skip_layers, str) else skip_layers)]
    users = _users_of_parameters(model)
    layers, skipped = [], {}
    inside = set()  # modules of which a parent says that they are not called
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            inside.update(id(part) for part in module.modules())
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        reason = "its parent uses its weight without calling it" if id(module) in inside else None
        if isinstance(module, torch.nn.MultiheadAttention):
            reason = _REASONS[torch.nn.MultiheadAttention]
        reason = _reason_to_skip(name, module, patterns, users) if reason is None else reason
        if reason is None:
            layers.append(Layer(name, module))
        else:
            skipped[name] = reason
    return layers, skipped


def _pattern(text):
    try:
        return re.compile(text, re.IGNORECASE)
    except (re.error, TypeError) as error:
        raise SpecError(f"skip_layers: {text!r} is no regular expression: {error}") from error


def _users_of_parameters(model):
    """{parameter: names of the modules that have it}"""
    users = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    return users


def _reason_to_skip(name, module, patterns, users):
    kind = type(module).__name__
    if any(pattern.search(name) or pattern.search(kind) for pattern in patterns):
        return "skip_layers"
    if not isinstance(module, (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)):
        known = [reason for layer_type, reason in _REASONS.items() if isinstance(module, layer_type)]
        return known[0] if known else f"{kind} is no linear layer or convolution"
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return "its shape is not known yet: run a batch through the model first"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters"
    if not weight.requires_grad:
        return "its weight takes no gradient"
    others = [other for parameter in module.parameters(recurse=False) for other in users[parameter] if other != name]
    if others:
        return f"its parameters are shared with {others[0]}"
    return _reason_of_size(module, weight)


def _reason_of_size(module, weight):
    if weight.dtype not in DTYPE_CODES:
        return f"its weight is {weight.dtype}, expected float32, float16 or bfloat16"
    if weight.numel() == 0:
        return "its weight is empty"
    has_bias = _trains_bias(module)
    if has_bias and module.bias.dtype != weight.dtype:
        return f"its bias is {module.bias.dtype}, its weight {weight.dtype}"
    if has_bias and module.bias.shape != weight.shape[:1]:
        return f"its bias has the shape {tuple(module.bias.shape)}, expected {tuple(weight.shape[:1])}"
    groups = getattr(module, "groups", 1)
    rows = max(weight.shape[0] // groups, weight[0].numel() + has_bias)
    if rows > MOST_FACTOR_ROWS:
        return f"a factor would have {rows} rows, at most {MOST_FACTOR_ROWS} are possible"
    return None


def _trains_bias(module):
    return module.bias is not None and module.bias.requires_grad


def _padding_of(module):
    """(before, after) of each dimension."""
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(pad, pad) for pad in module.padding]
