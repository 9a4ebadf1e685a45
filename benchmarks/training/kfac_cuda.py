# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What K-FAC's work takes on a CUDA device, beside the same work written with torch's own products. Rows are CSV.

    python benchmarks/training/kfac_cuda.py libcortado_cuda_kfac.so

Layers of ResNet-50 at 32 images of 224 x 224, and two blocks of a GPT of width 1024 at 8,192 tokens; normal values of
float32, and float32 products without TF32 on both sides. Times are between two moments at which the device had nothing
left to do, those of the host included.

    factors       patches and products of all activations and output gradients
    inverses      eigenvectors of all factors, by torch.linalg.eigh on the device
    precondition  all gradients between eigenvectors, and the inner product that a clip needs

`difference`, to what torch finds, is checked first: of factors, and of gradients that were preconditioned with inverses
of these factors.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from cortado import _core
from torch.nn import functional

WARM_UP, RUNS = 2, 10
DAMPING = 0.01
# Of sums of products in another order; eigenvectors of close eigenvalues differ more, what they are used for less.
MOST_DIFFERENCE = {"factors": 1e-4, "precondition": 1e-2}


@dataclass(frozen=True)
class Layer:
    inputs: int  # channels, or features
    outputs: int
    has_bias: bool = False
    size: int = 0  # of a convolution's window; 0: linear
    stride: int = 1
    side: int = 1  # of its input

    def to_core(self, name):
        window = (self.size, self.stride, 1, self.size // 2, self.size // 2)
        windows = [window, window] if self.size else None
        return name, self.inputs * max(self.size, 1) ** 2, self.outputs, self.has_bias, 1, windows

    @property
    def positions_side(self):
        return (self.side + 2 * (self.size // 2) - self.size) // self.stride + 1 if self.size else 1

    @property
    def cols(self):
        return self.inputs * max(self.size, 1) ** 2 + self.has_bias


def resnet50():
    layers = [Layer(3, 64, size=7, stride=2, side=224)]
    inputs, side = 64, 56
    for width, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            if block == 0:
                layers.append(Layer(inputs, 4 * width, size=1, stride=stride, side=side))
            layers.append(Layer(inputs, width, size=1, side=side))
            layers.append(Layer(width, width, size=3, stride=stride, side=side))
            side //= stride
            layers.append(Layer(width, 4 * width, size=1, side=side))
            inputs = 4 * width
    return [*layers, Layer(2048, 1000, has_bias=True)]


def gpt(blocks=2, width=1024):
    shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return [Layer(*shape, has_bias=True) for _ in range(blocks) for shape in shapes]


def small():
    return [Layer(3, 4, size=3, stride=2, side=9), Layer(4, 5, size=1, side=3), Layer(6, 7, has_bias=True)]


class Work:
    """One model's data on the device, and a Kfac of one rank."""

    def __init__(self, layers, count, device, library):
        self.layers, self.count, self.device = layers, count, device
        options = {
            **{"strategy": "COMM-OPT", "workers": 0, "is_eigen": True, "pi_correction": False},
            **{"colocate_factors": True, "balance_memory": False, "compression": "none"},
            **{"use_error_feedback": False, "aggregate": 0, "random_seed": 0},
            **{"factor_compression": "none", "schedule": "", "timeout_s": 600.0, "threads": 1},
            "checks_collectives": False,
            **{"device_library": library, "device": 0},
        }
        named = [layer.to_core(f"layer{i}") for i, layer in enumerate(layers)]
        self.core = _core.Kfac(named, options, None, 0, 1, "")
        made = {}  # layers of one shape share their values

        def normal(*shape):
            if shape not in made:
                made[shape] = torch.randn(*shape, device=device)
            return made[shape]

        self.activations, self.output_gradients = [], []
        for layer in layers:
            plane, out = (layer.side,) * 2, (layer.positions_side,) * 2
            self.activations.append(normal(count, layer.inputs, *(plane if layer.size else ())))
            self.output_gradients.append(normal(count, layer.outputs, *(out if layer.size else ())))
        self.gradients = [torch.randn(layer.outputs, layer.cols, device=device) for layer in layers]
        self.factors, self.eigen = None, None

    def stream(self):
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- cortado

    def add_factors(self):
        self.core.reset_batch()
        for i, (x, d) in enumerate(zip(self.activations, self.output_gradients, strict=True)):
            for is_activations, values in ((True, x), (False, d)):
                plane = values.shape[2:] or (1, 1)
                self.core.add_batch(i, is_activations, values.data_ptr(), 0, len(values), *plane, 1.0, self.stream())
        self.core.release_batches(self.stream())

    def step(self, factors=False, inverses=False):
        """The preconditioned gradients; the copies that are preconditioned belong to it."""
        results, addresses = [], []
        for layer, gradient in zip(self.layers, self.gradients, strict=True):
            weight = gradient[:, : layer.cols - layer.has_bias].clone(memory_format=torch.contiguous_format)
            bias = gradient[:, -1].clone()
            results.append((weight, bias))
            addresses.append((weight.data_ptr(), bias.data_ptr() if layer.has_bias else 0, 0))
        kl_clip, lr = 0.0, 0.1
        if not self.core.step(0.0, DAMPING, kl_clip, lr, factors, inverses, addresses, self.stream()):
            raise SystemExit("a gradient is not finite")
        return [
            torch.cat([weight, bias[:, None]], 1) if layer.has_bias else weight
            for layer, (weight, bias) in zip(self.layers, results, strict=True)
        ]

    def inverses_ns(self):
        return self.core.report()["time_by_stage_ns"]["inverses"]

    # ---- torch

    def torch_factors(self):
        return [
            factor
            for layer, x, d in zip(self.layers, self.activations, self.output_gradients, strict=True)
            for factor in (self._torch_a(layer, x), self._torch_g(d))
        ]

    @staticmethod
    def _torch_a(layer, x):
        positions = layer.positions_side**2
        if not layer.size:
            rows = torch.cat([x, x.new_ones(len(x), 1)], 1) if layer.has_bias else x
        else:
            patches = functional.unfold(x, layer.size, padding=layer.size // 2, stride=layer.stride)
            rows = patches.transpose(1, 2).reshape(-1, layer.cols)
        return rows.T @ (rows / (len(rows) * positions**2))

    @staticmethod
    def _torch_g(d):
        positions = d[0, 0].numel()
        rows = d.flatten(2).transpose(1, 2).reshape(-1, d.shape[1]) if d.dim() > 2 else d
        return rows.T @ (rows / (len(rows) * positions**2))

    def torch_inverses(self):
        return [torch.linalg.eigh(factor) for factor in self.factors]

    def torch_precondition(self):
        results, product = [], 0
        for i, gradient in enumerate(self.gradients):
            (a_values, a), (g_values, g) = self.eigen[2 * i : 2 * i + 2]
            inner = g.T @ gradient @ a
            inner /= g_values.clamp(min=0)[:, None] * a_values.clamp(min=0) + DAMPING
            results.append(g @ inner @ a.T)
            product = product + (results[-1] * gradient).sum()
        return results, float(product)

    # ---- both

    def check(self):
        """Differences of factors and of gradients to what torch finds."""
        self.factors = self.torch_factors()
        self.add_factors()
        found = self.step(factors=True, inverses=True)
        state = self.core.save_state(False)["layers"]
        triangles = [state[f"layer{i}"][f"{side}_factor"] for i in range(len(self.layers)) for side in "ag"]
        lost = total = 0.0
        for triangle, factor in zip(triangles, self.factors, strict=True):
            n = len(factor)
            lower = torch.tril_indices(n, n, device=factor.device)
            difference = torch.from_numpy(triangle).to(factor.device) - factor[lower[0], lower[1]]
            lost, total = (
                lost + float(difference.square().sum()),
                total + float(factor[lower[0], lower[1]].square().sum()),
            )
        self.eigen = self.torch_inverses()
        expected, _ = self.torch_precondition()
        pairs = list(zip(found, expected, strict=True))
        gradients = sum(float((f - e).square().sum()) for f, e in pairs) / sum(
            float(e.square().sum()) for _, e in pairs
        )
        return {"factors": (lost / total) ** 0.5, "precondition": gradients**0.5}

    def milliseconds(self, call):
        times = []
        for run in range(WARM_UP + RUNS):
            self.synchronize()
            begin = time.perf_counter_ns()
            call()
            self.synchronize()
            if run >= WARM_UP:
                times.append((time.perf_counter_ns() - begin) / 1e6)
        return times

    def inverses_ms(self):
        begin = self.inverses_ns()
        self.step(inverses=True)
        return (self.inverses_ns() - begin) / 1e6


def measure(model, layers, count, device, library):
    work = Work(layers, count, device, library)
    differences = work.check()
    for what, most in MOST_DIFFERENCE.items():
        if not differences[what] < most:
            raise SystemExit(
                f"{model}: {what} differ by {differences[what]:.2g} from torch's, at most {most:g} are expected"
            )

    def row(what, who, times):
        difference = f"{differences[what]:.2g}" if who == "cortado" and what in differences else ""
        print(f"{model},{what},{who},{statistics.median(times):.3f},{max(times):.3f},{difference}", flush=True)

    row("factors", "cortado", work.milliseconds(work.add_factors))
    row("factors", "torch", work.milliseconds(work.torch_factors))
    row("inverses", "cortado", [work.inverses_ms()])
    work.synchronize()
    begin = time.perf_counter_ns()
    work.torch_inverses()
    work.synchronize()
    row("inverses", "torch", [(time.perf_counter_ns() - begin) / 1e6])
    row("precondition", "cortado", work.milliseconds(work.step))
    row("precondition", "torch", work.milliseconds(work.torch_precondition))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--emulated", action="store_true", help="the library's device is the CPU; small layers")
    arguments = parser.parse_args()
    if not (arguments.emulated or torch.cuda.is_available()):
        print("no CUDA device: nothing was measured")
        return 0
    torch.manual_seed(0)
    device = torch.device("cpu") if arguments.emulated else torch.device("cuda", 0)
    print("model,what,who,median_ms,slowest_ms,difference")
    if arguments.emulated:
        measure("small", small(), 5, device, arguments.library)
    else:
        measure("resnet50", resnet50(), 32, device, arguments.library)
        measure("gpt", gpt(), 8192, device, arguments.library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
