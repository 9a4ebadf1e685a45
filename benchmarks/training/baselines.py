# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What Cortado is compared with: DDP communication hooks that PyTorch has, or that take an afternoon.

A hook returns the average itself (DDP does not divide when a hook is registered), and its second
parameter must be called `bucket`. No `from __future__ import annotations` here: DDP looks at the
classes in the annotations.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.futures import Future


def empty_hook(_: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Sends nothing: a bucket keeps this rank's own gradients."""
    future = Future()
    future.set_result(bucket.buffer())
    return future


class CastState:
    """All-reduce in a narrower float; `error` is measured in the steps that have `probe` set."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.probe = False
        self.lost_squared = self.sent_squared = 0.0

    @property
    def relative_error(self) -> float:
        return (self.lost_squared / max(self.sent_squared, 1e-30)) ** 0.5


def cast_hook(state: CastState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """As PyTorch's bf16_compress_hook, which refuses Gloo: cast, all-reduce, copy back."""
    buffer = bucket.buffer()
    narrow = buffer.to(state.dtype)
    if state.probe:
        state.lost_squared += (buffer - narrow).square().sum().item()
        state.sent_squared += buffer.square().sum().item()
    narrow.div_(dist.get_world_size())
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


class PowerState(torch_power.PowerSGDState):
    """PowerSGD with two dense steps, as Cortado has by default, and every matrix compressed that shrinks at all."""

    def __init__(self, rank: int, batched: bool = False):
        settings = {
            "min_compression_rate": 1,
            "start_powerSGD_iter": 2,
            "batch_tensors_with_same_shape": batched,
        }
        super().__init__(None, matrix_approximation_rank=rank, **settings)
        self.probe = False
        self.relative_error = 0.0


def power_hook(state: PowerState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """PyTorch's own hook, held to one bucket: with more, on Gloo, it aborts or mixes up data.

    It issues the second and third all-reduce of a bucket from callbacks, in an order that differs
    between ranks.
    """
    if bucket.index() != 0 or not bucket.is_last():
        raise RuntimeError("PowerSGD on Gloo needs one bucket: raise bucket_cap_mb")
    if not state.probe:
        return torch_power.powerSGD_hook(state, bucket)
    sent = [gradient.clone() for gradient in bucket.gradients()]
    at = 0
    for piece in sent if 0 in state.error_dict else []:
        piece += state.error_dict[0][at : at + piece.numel()].view_as(piece)
        at += piece.numel()

    def measure(done):
        state.relative_error = _outside_range(sent, bucket.gradients(), state)
        return done.value()

    return torch_power.powerSGD_hook(state, bucket).then(measure)


def _outside_range(sent, received, state) -> float:
    """Relative L2 norm of the part of this rank's `sent` that the shared factor P cannot carry.

    That is the error Cortado reports as well, over the compressed tensors. The residual that PowerSGD
    keeps is larger: it also holds the disagreement between the ranks.
    """
    lost_squared = total_squared = 0.0
    for mine, average in zip(sent, received, strict=True):
        matrix, low_rank = (x.view(x.shape[0], -1) for x in (mine, average))
        rows, columns = matrix.shape
        rank = min(state.matrix_approximation_rank, rows, columns)
        if (rows + columns) * rank < rows * columns:
            basis = torch.linalg.qr(low_rank @ torch.randn(columns, rank, device=matrix.device))[0]  # spans P
            total_squared += matrix.square().sum().item()
            lost_squared += (matrix - basis @ (basis.T @ matrix)).square().sum().item()
    return (lost_squared / max(total_squared, 1e-30)) ** 0.5


class TorchAcpState:
    """ACP-SGD in PyTorch operations: one all-reduce a bucket, residual by parameter, QR a tensor."""

    def __init__(self, rank: int, start_step: int = 2):
        self.rank = rank
        self.start_step = start_step
        self.step = 0
        self.factors: dict[torch.Tensor, list[torch.Tensor]] = {}  # parameter -> [P, Q]
        self.residuals: dict[torch.Tensor, torch.Tensor] = {}
        self.payload_elems = 0  # of the step so far
        self.last_payload_elems = 0
        self.probe = False
        self.lost_squared = self.sent_squared = 0.0

    @property
    def relative_error(self) -> float:
        return (self.lost_squared / max(self.sent_squared, 1e-30)) ** 0.5

    def factors_of(self, parameter: torch.Tensor, matrix: torch.Tensor) -> list[torch.Tensor]:
        if parameter not in self.factors:
            rank = min(self.rank, *matrix.shape)
            generator = torch.Generator().manual_seed(len(self.factors))
            sides = [torch.randn(n, rank, generator=generator) for n in matrix.shape]
            self.factors[parameter] = sides
            self.residuals[parameter] = torch.zeros_like(matrix)
        return self.factors[parameter]


def torch_acp_hook(state: TorchAcpState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """One all-reduce of P (even steps) or Q (odd steps) and the dense tensors of the bucket."""
    pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    if state.step < state.start_step:
        buffer = bucket.buffer().div_(dist.get_world_size())
        message, decode = buffer, lambda _: buffer
    else:
        pieces = [_project(state, parameter, gradient) for parameter, gradient in pairs]
        message = torch.cat([piece.flatten() for piece in pieces]).div_(dist.get_world_size())
        side = state.step % 2

        def decode(done):
            _reconstruct(state, side, pairs, pieces, done.value()[0])
            return bucket.buffer()

    state.payload_elems += message.numel()
    if bucket.is_last():
        state.step += 1
        state.last_payload_elems, state.payload_elems = state.payload_elems, 0
    return dist.all_reduce(message, async_op=True).get_future().then(decode)


def _project(state, parameter, gradient) -> torch.Tensor:
    """This rank's new factor; what it does not hold stays in the residual. 1-D: as it is."""
    matrix = gradient.view(gradient.shape[0], -1)
    rows, columns = matrix.shape
    if (rows + columns) * min(state.rank, rows, columns) >= rows * columns:
        return gradient
    factors, residual = state.factors_of(parameter, matrix), state.residuals[parameter]
    side = state.step % 2
    residual.add_(matrix)
    sent = residual.square().sum().item() if state.probe else 0.0
    reused = factors[1 - side] = torch.linalg.qr(factors[1 - side])[0]
    if side == 0:
        new = residual @ reused
        residual.addmm_(new, reused.T, alpha=-1)
    else:
        new = residual.T @ reused
        residual.addmm_(reused, new.T, alpha=-1)
    if state.probe:
        state.sent_squared += sent
        state.lost_squared += residual.square().sum().item()
    return new


def _reconstruct(state, side, pairs, pieces, message) -> None:
    """Averaged factors back to gradients, in place."""
    at = 0
    for (parameter, gradient), piece in zip(pairs, pieces, strict=True):
        average = message[at : at + piece.numel()].view_as(piece)
        at += piece.numel()
        if piece is gradient:
            gradient.copy_(average)
            continue
        factors = state.factors[parameter]
        factors[side] = average.clone()
        matrix = gradient.view(gradient.shape[0], -1)
        torch.mm(factors[0], factors[1].T, out=matrix)
