# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""A communicator for kfac-pytorch (https://github.com/gpauloski/kfac-pytorch) that compresses preconditioned gradients.

    preconditioner = kfac.preconditioner.KFACPreconditioner(model, grad_worker_fraction=1 / world_size, ...)
    use_in(preconditioner, codec="compso(bound=4e-3)", error_feedback=True)

kfac-pytorch makes its communicator itself and offers no other way in: `use_in` puts this one in its place, in the
preconditioner and in each of its layers. The calls are those of its TorchDistributedCommunicator.

kfac-pytorch broadcasts one layer after the other; here they wait for flush_allreduce_buckets(), which it calls once all
are started, and travel together, in one message a rank. What is summed (factors), and what is broadcast in other groups
(eigenvectors and eigenvalues), travels as it is.
"""

import contextlib

import cortado
import torch
import torch.distributed as dist


def use_in(preconditioner, codec, error_feedback=False):
    """Gives a kfac-pytorch preconditioner the communicator, and returns it; on every rank, before the first step."""
    assignment = preconditioner._assignment
    layers = list(preconditioner._layers.values())
    receivers = [assignment.grad_receiver_group(name) for name, _ in layers]
    communicator = CompressingCommunicator(
        codec, error_feedback=error_feedback, groups=receivers, bucket_cap_mb=preconditioner.allreduce_bucket_cap_mb
    )
    preconditioner._tdc = communicator
    for _, layer in layers:
        layer.tdc = communicator
    return communicator


class CompressingCommunicator:
    """groups: process groups whose broadcasts are compressed; None: all broadcasts of tensors that Cortado takes."""

    def __init__(self, codec, *, error_feedback=False, groups=None, bucket_cap_mb=25.0):
        self.codec, self.error_feedback, self.groups = codec, error_feedback, groups
        self.bucket_cap_bytes = int(bucket_cap_mb * 1e6)
        self.gathers = {}  # by (group, shapes, owners): one for each list of tensors that repeats
        self._broadcasts = []  # (group, tensor, owner, future)
        self._sums = {}  # group: [(tensor, future), ...]

    # ---- kfac-pytorch's calls; each returns a tensor or a Future of one

    def allreduce(self, tensor, *, average=False, group=None, symmetric=False):
        if dist.get_world_size(group) == 1:
            return tensor
        packed = _pack(tensor, symmetric)
        started = dist.all_reduce(packed, group=group, async_op=True).get_future()
        count = dist.get_world_size(group) if average else 1
        return started.then(lambda done: _unpack(done.value()[0] / count, tensor.shape, symmetric))

    def allreduce_bucketed(self, tensor, *, average=False, group=None, symmetric=False):
        if dist.get_world_size(group) == 1:
            return tensor
        packed = _pack(tensor, symmetric)
        waiting = self._sums.get(group)
        if waiting and sum(t.nbytes for t, _ in waiting) + packed.nbytes > self.bucket_cap_bytes:
            self._sum(group)  # a tensor above the cap has a bucket of its own
        future = torch.futures.Future()
        self._sums.setdefault(group, []).append((packed, future))
        count = dist.get_world_size(group) if average else 1
        return future.then(lambda done: _unpack(done.value() / count, tensor.shape, symmetric))

    def broadcast(self, tensor, *, src, group=None, symmetric=False):
        if dist.get_world_size(group) == 1:
            return tensor
        packed = _pack(tensor, symmetric)
        is_chosen = not symmetric and (self.groups is None or any(group is one for one in self.groups))
        if is_chosen and packed.device.type != "cpu":
            raise ValueError(f"this communicator compresses tensors in host memory, got one on {packed.device}")
        if is_chosen and packed.dtype in (torch.float32, torch.float16, torch.bfloat16):
            future = _Waiting(self)
            owner = src if group is None else dist.get_group_rank(group, src)
            self._broadcasts.append((group, packed, owner, future))
            return future
        started = dist.broadcast(packed, src=src, group=group, async_op=True).get_future()
        return started.then(lambda done: _unpack(done.value()[0], tensor.shape, symmetric))

    def flush_allreduce_buckets(self):
        for group in list(self._sums):
            self._sum(group)
        waiting, self._broadcasts = self._broadcasts, []
        with _errors_reach(one[-1] for one in waiting):
            for group in dict.fromkeys(one[0] for one in waiting):
                self._gather(group, [one[1:] for one in waiting if one[0] is group])

    # ---- the exchanges

    def _sum(self, group):
        tensors, futures = zip(*self._sums.pop(group), strict=True)

        def deliver(done):
            with _errors_reach(futures):
                parts = done.value()[0].split([tensor.numel() for tensor in tensors])
                for part, tensor, future in zip(parts, tensors, futures, strict=True):
                    future.set_result(part.view_as(tensor))

        with _errors_reach(futures):
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat, group=group, async_op=True).get_future().then(deliver)

    def _gather(self, group, waiting):
        tensors, owners, futures = zip(*waiting, strict=True)
        key = (group, tuple((tensor.shape, tensor.dtype) for tensor in tensors), owners)
        if key not in self.gathers:
            self.gathers[key] = cortado.CompressedAllGather(
                tensors, owners, self.codec, error_feedback=self.error_feedback, process_group=group
            )
        self.gathers[key](tensors)
        for tensor, future in zip(tensors, futures, strict=True):
            future.set_result(tensor)


class _Waiting(torch.futures.Future):
    """Of a tensor that travels with the next flush; who waits for it before, flushes."""

    def __init__(self, communicator):
        super().__init__()
        self._communicator = communicator

    def wait(self):
        if not self.done():
            self._communicator.flush_allreduce_buckets()
        return super().wait()


@contextlib.contextmanager
def _errors_reach(futures):
    """Who waits for one of them gets the error."""
    try:
        yield
    except Exception as error:
        for future in futures:
            if not future.done():
                future.set_exception(error)
        raise


def _pack(tensor, symmetric):
    if not symmetric:
        return tensor.contiguous()
    if tensor.dim() != 2 or tensor.shape[0] != tensor.shape[1]:
        raise ValueError(f"a symmetric tensor has as many rows as columns, got the shape {tuple(tensor.shape)}")
    return tensor[tuple(torch.triu_indices(*tensor.shape))]


def _unpack(packed, shape, symmetric):
    if not symmetric:
        return packed
    full = packed.new_zeros(shape)
    full[tuple(torch.triu_indices(*shape))] = packed
    return full + full.triu(1).T
