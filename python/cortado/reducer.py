# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Reducer: averages gradients without DistributedDataParallel, for training loops of one's own.

Autograd calls a hook as soon as the gradient of a parameter is complete. Gradients are handed to the engine in bunches
during the backward pass and travel meanwhile; wait() hands over what is missing and waits. No thread of ours has a
part in it.

When a message is complete differs between ranks where one of them leaves a parameter unused. So where another
attachment sends on the same process group, everything waits for wait(): steps follow each other there, in one order on
all ranks.
"""

import contextlib
import time
import weakref
from functools import partial

import torch
import torch.distributed as dist

from . import _core
from .agreement import agree_on_flag, agree_on_text, on_all_ranks
from .attachment import Attachment, count_sender, holder_of, mark_closed, mark_open
from .errors import CortadoError, MismatchError, PeerError, SpecError
from .group import BYTE_CODE, DTYPE_CODES
from .parameters import in_memory_order, is_sharded, local_of, reshard, trainable_of, without_compile
from .spec import text_for_engine

_BUNCH_BYTES = 1 << 20  # of gradients handed over together
_FIRST_BUCKET_BYTES = 1 << 20  # codec none: buffers as DDP's, the first small so that it leaves early
_BUCKET_BYTES = 25 << 20


class Reducer(Attachment):
    """Averages the gradients of parameters over the ranks of a group, compressed as ``plan`` says.

        reducer = cortado.Reducer(model, "acp(rank=4)")      # on every rank, before the first backward pass
        loss.backward()                                      # gradients travel meanwhile
        reducer.wait()                                       # now every .grad is the mean over the ranks
        optimizer.step()

    params: a module, or named tensors as model.named_parameters() or a list of (name, tensor) gives them. Those with
        requires_grad are averaged. A module that DDP or FSDP has wrapped is refused: they average by themselves. One
        of fully_shard is not where process_group is that of the ranks that hold the same shards: what each of them
        holds is averaged over the replicas. With a named codec or a plan; in a plan tensors are what a rank holds.
    plan: as for cortado.attach.
    process_group: default the whole world.
    init_sync: parameters (and a module's buffers) start equal to those of the group's first rank, as with DDP.
    grad_scaler: the torch.amp.GradScaler (or anything with get_scale()) whose scale the gradients carry, if any.
    check_replicas: every so many steps a checksum of each parameter is compared over the ranks; 0: never.
    check_collectives, timeout_s: as for cortado.attach.
    verbose: rank 0 (of a sharded model its first shard's) prints one line about what is compressed and one about
        memory to stderr.

    A parameter without a gradient counts as zeros here. If every rank is without one, its .grad stays None; else it is
    the mean on every rank, as with DDP and find_unused_parameters=True. So a rank may have no backward pass in a step.

    While another Reducer is open on its process group, or since a model was attached there, nothing is sent during the
    backward pass, and everything in wait(), which all ranks call in one order: so that gradients travel meanwhile, give
    each a process group of its own.

    Errors within a step are fatal: every rank gets one, and a new Reducer over a new group is needed.
    """

    _held = frozenset()

    def __init__(
        self,
        params,
        plan="auto",
        *,
        process_group=None,
        init_sync=True,
        grad_scaler=None,
        check_replicas=0,
        check_collectives=False,
        timeout_s=None,
        verbose=True,
    ):
        if not dist.is_initialized():
            raise CortadoError("Reducer needs a process group: call torch.distributed.init_process_group first")
        named_tensors = None

        def list_parameters():
            nonlocal named_tensors
            is_module = isinstance(params, torch.nn.Module)
            if is_module:
                reshard(params)
            named_tensors = _named_tensors(without_compile(params))
            trainable = trainable_of(params, takes_sharded=True) if is_module else _trainable(named_tensors)
            _check(trainable)
            if any(is_sharded(tensor) for _, tensor, _ in trainable):
                _check_shards(trainable, process_group, plan)
            return trainable

        super().__init__(
            plan,
            list_parameters,
            process_group,
            grad_scaler=grad_scaler,
            check_replicas=check_replicas,
            check_collectives=check_collectives,
            timeout_s=timeout_s,
            verbose=verbose,
        )
        agree_on_flag(self._group, "init_sync", init_sync, self._engine.timeout_s)
        agree_on_text(self._group, "shards held", _shards_held(self._parameters), self._engine.timeout_s)
        if init_sync:
            _broadcast([tensor for _, tensor in named_tensors], process_group)
        # Shape, dtype and order in memory as the engine knows them; of no memory.
        self._templates = [torch.empty_like(local_of(parameter), device="meta") for parameter in self._parameters]
        carrier = _Buckets if self._engine.sends_buffers else _InPlace
        timeout_s = self._engine.timeout_s
        with on_all_ranks(self._group, "could not make a Reducer", timeout_s):  # memory may be pinned here
            self._carrier = carrier(self._engine, self._templates, self._transfers)
        self._used = _UsedTensors(self._group, self._names)
        self._given = [None] * len(self._parameters)  # gradients handed over in this step, and their versions
        self._step_begun = False
        self._held = set()  # of these what waits for wait()
        self._accumulated = set()  # tensors whose gradients came under no_sync()
        self._syncs = True
        self._handles = _hook_all(self._parameters, weakref.ref(self))
        self._unhook = weakref.finalize(self, _remove, self._handles)
        mark_open(self)
        count_sender(self, 1)

    # ---- the hooks

    def _on_gradient(self, index):
        if not self._step_begun:
            self._refuse_capture()  # before anything is sent: no reason to end the exchange
        start_ns = time.perf_counter_ns()
        try:  # not _errors_end_all(): this is once a parameter
            self._take(index)
        except BaseException as error:
            self._fail(error)
            raise
        self._hook_ns += time.perf_counter_ns() - start_ns

    def _take(self, index):
        self._check_usable()
        if self._given[index] is not None or (self._is_in_step and not self._syncs):
            raise CortadoError(
                f'"{self._names[index]}" got another gradient before wait(): call wait() after each backward pass, or '
                "run all but the last of a step under no_sync()"
            )
        if not self._syncs:
            self._accumulated.add(index)
            return
        gradient = self._parameters[index].grad
        if not self._step_begun and self._shares_group:
            self._note_given(index, gradient)
            self._held.add(index)
            return
        if not self._step_begun:
            self._begin()
        self._give(index, gradient)

    def _begin(self):
        self._begin_step()
        self._step_begun = True

    @property
    def _is_in_step(self):
        return self._step_begun or bool(self._held)

    def _note_given(self, index, gradient):
        placements = getattr(self._parameters[index], "placements", None)
        if getattr(gradient, "placements", None) != placements:
            raise SpecError(
                f'the gradient of "{self._names[index]}" is placed as {getattr(gradient, "placements", None)}, the '
                f"parameter as {placements}"
            )
        self._check_gradient(index, local_of(gradient))
        self._given[index] = (gradient, gradient._version)

    def _give(self, index, gradient):
        self._note_given(index, gradient)
        self._carrier.add(index, local_of(gradient).detach())

    @property
    def _owes_wait(self):
        """Whether there were gradients since the last wait()."""
        return self._is_in_step or bool(self._accumulated)

    def _check_usable(self):
        if self._failure is not None:
            raise CortadoError(f"this Reducer failed in an earlier step: {self._failure}") from self._failure
        if not self._unhook.alive:
            raise CortadoError("this Reducer is closed")
        self._refuse_capture()

    def _fail(self, error):
        super()._fail(error)
        self._unhook()  # from here on another Reducer may take the parameters

    def _memory_in_use(self):
        gradients = [local_of(given[0]).detach() for given in self._given if given is not None]
        return [gradients, self._carrier.memory(), self._used.memory()]

    def _check_gradient(self, index, gradient):
        template = self._templates[index]
        if gradient.layout is not torch.strided or gradient.device != self._device:
            raise SpecError(
                f"cortado exchanges dense gradients, of parameters that were on {self._device} when the Reducer was "
                f'made; that of "{self._names[index]}" is {gradient.layout} on {gradient.device}'
            )
        if gradient.shape != template.shape or gradient.dtype != template.dtype:
            raise MismatchError(
                f'the gradient of "{self._names[index]}" is {tuple(gradient.shape)} {gradient.dtype}; the Reducer was '
                f"made for {tuple(template.shape)} {template.dtype}. Make a new one when parameters change"
            )

    # ---- what users call

    def wait(self):
        """Returns when every gradient is the mean over the ranks. Call it once a step, on every rank.

        It belongs between the last backward pass of a step and whatever reads gradients: GradScaler.unscale_,
        clipping, the optimizer's step. A rank that had no backward pass takes part with zeros, whatever an earlier step
        has left in its gradients; where no rank had one, that is an error on all.
        """
        self._check_usable()
        if self._group.world_size == 1 and not self._owes_wait:
            raise CortadoError("wait(): there was no backward pass since the last wait()")
        start_ns = time.perf_counter_ns()
        with self._errors_end_all():
            any_backward = self._finish()
        self._hook_ns += time.perf_counter_ns() - start_ns
        self._warn_of_stale()  # the step has been delivered, should this be an error
        if not any_backward:
            raise CortadoError("wait(): no rank had a backward pass since the last wait()")

    def _finish(self):
        """Whether some rank had a backward pass."""
        had_backward = self._owes_wait  # else what lies in .grad is of an earlier step
        if not self._step_begun:
            self._begin()
        missing = []
        for index, (parameter, given) in enumerate(zip(self._parameters, self._given, strict=True)):
            if given is not None:
                self._check_untouched(index, parameter.grad, *given)
                if index in self._held:
                    self._carrier.add(index, local_of(parameter.grad).detach())
            elif parameter.grad is not None and had_backward:
                # Accumulated under no_sync(), zeros, or what an earlier step left.
                if index not in self._accumulated:
                    self._note_stale(index, local_of(parameter.grad))
                self._give(index, parameter.grad)
            else:
                missing.append((index, torch.zeros_like(self._templates[index], device=self._device)))
                self._carrier.add(*missing[-1])
        self._carrier.flush()
        self._transfers.hand_over_all()
        self._finish_step()
        self._carrier.deliver()
        self._transfers.join()
        is_used = [given is not None for given in self._given]
        used, any_backward = self._used.gather(is_used, had_backward, self._step, self._engine.timeout_s)
        for index, mean in missing if any_backward else ():
            parameter = self._parameters[index]
            parameter.grad = _shard_like(parameter, mean) if used[index] else None
        self._given = [None] * len(self._given)
        self._accumulated.clear()
        self._held.clear()
        self._step_begun = False
        return any_backward

    def _check_untouched(self, index, gradient, given, version):
        if gradient is not given or given._version != version:
            raise CortadoError(
                f'the gradient of "{self._names[index]}" was changed between backward() and wait(), when it was on its '
                "way already: zero_grad(), unscale_() and clipping belong after wait(); and a module that DDP has "
                "wrapped too averages by itself"
            )

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes in it only accumulate; the first one after it (or wait()) exchanges the sum."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def close(self):
        """Takes the hooks off the parameters. On every rank; within a step the other ranks get an error."""
        if self._unhook.alive and self._is_in_step:
            self._fail(CortadoError("the Reducer was closed within a step"))
        if self._unhook.alive:
            count_sender(self, -1)
        self._unhook()
        mark_closed(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---- how gradients get to the engine and back ------------------------------------------------------------------------


class _InPlace:
    """Gradients are read and overwritten where they lie; those on a device where they were copied to."""

    def __init__(self, engine, templates, transfers):
        self._engine, self._templates, self._transfers = engine, templates, transfers
        self._host_copies = None if transfers.in_place else _make_host_copies(templates, transfers)
        self._bunch, self._bunch_bytes = [], 0
        self._missing = len(templates)
        self._copied = []  # (gradient, copy in memory order)

    def add(self, index, gradient):
        ordered = self._in_host_memory(index, gradient)
        if ordered is not gradient:
            self._copied.append((gradient, ordered))
        self._bunch.append((index, ordered.data_ptr()))
        self._bunch_bytes += ordered.nbytes
        self._missing -= 1
        if self._bunch_bytes >= _BUNCH_BYTES or self._missing == 0:
            self.flush()

    def _in_host_memory(self, index, gradient):
        if self._host_copies is None:
            return in_memory_order(self._templates[index], gradient)
        self._transfers.fetch(self._host_copies[index], gradient)
        return self._host_copies[index]

    def flush(self):
        if self._bunch:
            addresses = _core.BucketMap(*map(list, zip(*self._bunch, strict=True)))
            self._transfers.when_fetched(partial(self._engine.submit, addresses, 0))
        self._bunch, self._bunch_bytes = [], 0

    def memory(self):
        return [self._host_copies, *self._copied]

    def deliver(self):
        for gradient, ordered in self._copied:
            self._transfers.send(gradient, ordered)
        self._copied = []
        self._missing = len(self._templates)


class _Buckets:
    """Codec none: gradients are copied into flat buffers, which are summed whole, in one order that all ranks share."""

    def __init__(self, engine, templates, transfers):
        self._engine, self._transfers = engine, transfers
        self._buffers, self._place = [], {}
        for members, buffer, views in _make_buffers(templates, transfers):
            offsets = [view.data_ptr() - buffer.data_ptr() for view in views]
            for index, view in zip(members, views, strict=True):
                self._place[index] = (len(self._buffers), view.view(templates[index].shape))
            self._buffers.append((buffer, _core.BucketMap(members, offsets), len(members)))
        self._begin()

    def _begin(self):
        self._missing = [count for _, _, count in self._buffers]
        self._next = 0
        self._gradients = []

    def add(self, index, gradient):
        number, view = self._place[index]
        self._transfers.fetch(view, gradient)
        self._gradients.append((gradient, view))
        self._missing[number] -= 1
        while self._next < len(self._buffers) and self._missing[self._next] == 0:
            buffer, members, _ = self._buffers[self._next]
            what = (members, buffer.data_ptr(), buffer.numel(), DTYPE_CODES[buffer.dtype])
            self._transfers.when_fetched(partial(self._engine.submit_buffer, *what))
            self._next += 1

    def flush(self):
        pass  # the last buffer left with its last gradient

    def memory(self):
        return [buffer for buffer, _, _ in self._buffers]

    def deliver(self):
        for gradient, view in self._gradients:
            self._transfers.send(gradient, view)
        self._begin()


def _make_buffers(templates, transfers):
    """(indices, flat buffer, a flat view of it for each index), for lists that _split_into_buckets() gives."""
    for members in _split_into_buckets(templates):
        sizes = [templates[i].numel() for i in members]
        buffer = transfers.host_memory(torch.empty(sum(sizes), dtype=templates[members[0]].dtype, device="meta"))
        yield members, buffer, buffer.split(sizes)


def _make_host_copies(templates, transfers):
    """Memory for each gradient, in the memory order of its template."""
    copies = [None] * len(templates)
    for members, _, views in _make_buffers(templates, transfers):
        for index, view in zip(members, views, strict=True):
            copies[index] = view.as_strided(templates[index].shape, templates[index].stride())
    return copies


def _split_into_buckets(parameters):
    """Lists of indices, last parameter first, each of one dtype and up to a bucket's bytes."""
    buckets, cap_bytes = [], _FIRST_BUCKET_BYTES
    filling = {}  # dtype -> (indices, bytes)
    for index in reversed(range(len(parameters))):
        indices, used_bytes = filling.get(parameters[index].dtype, ([], 0))
        indices.append(index)
        used_bytes += parameters[index].nbytes
        filling[parameters[index].dtype] = (indices, used_bytes)
        if used_bytes >= cap_bytes:
            buckets.append(filling.pop(parameters[index].dtype)[0])
            cap_bytes = _BUCKET_BYTES
    return buckets + [indices for indices, _ in filling.values()]


class _UsedTensors:
    """Which tensors some rank has a gradient for, and whether one had a backward pass. One byte a tensor, and one,
    gathered once the engine's messages have ended: where among them it would come otherwise is not the same on all
    ranks."""

    def __init__(self, group, names):
        self._group = group
        self._own = torch.empty(len(names) + 1, dtype=torch.uint8)
        self._all = torch.empty(group.world_size, len(names) + 1, dtype=torch.uint8)
        self._what = f'"{names[0]}"' + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    def memory(self):
        return [self._own, self._all]

    def gather(self, is_used, had_backward, step, timeout_s):
        self._own.copy_(torch.tensor([*is_used, had_backward], dtype=torch.uint8))
        count, sent, received = self._own.numel(), self._own.data_ptr(), self._all.data_ptr()
        try:
            self._group.start("used tensors", "all_gather", BYTE_CODE, sent, received, count, 0, None, None)
            self._group.wait("used tensors", timeout_s)
        except (RuntimeError, TimeoutError) as error:
            what = f"step {step}: communicate: whether some rank has used {self._what}"
            raise PeerError(f"{what}: {error}") from error
        *used, any_backward = self._all.any(0).tolist()
        return used, any_backward


# ---- set-up ----------------------------------------------------------------------------------------------------------


def _named_tensors(params):
    """(name, tensor) of everything that is to start equal on all ranks."""
    if isinstance(params, torch.nn.parallel.DistributedDataParallel):
        raise SpecError(
            "DistributedDataParallel averages gradients itself: give the Reducer ddp.module and train that, or use "
            "cortado.attach(ddp, plan)"
        )
    if isinstance(params, torch.nn.Module):
        return [*params.named_parameters(), *params.named_buffers()]
    try:
        named = [(name, tensor) for name, tensor in params]
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"Reducer needs a module or named tensors, such as model.named_parameters(); got {type(params).__name__} "
            "without names: residuals are kept by name"
        ) from error
    for name, tensor in named:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            got = f"({type(name).__name__}, {type(tensor).__name__})"
            raise SpecError(f"Reducer needs (name, tensor) pairs, such as model.named_parameters(); got {got}")
    return named


def _trainable(named_tensors):
    """As parameters.trainable_of(); which of them are embeddings can't be seen here."""
    return [(name, tensor, False) for name, tensor in named_tensors if tensor.requires_grad]


def _check(trainable):
    if not trainable:
        raise SpecError("Reducer was given no parameter that requires a gradient")
    seen = {}
    for name, tensor, _ in trainable:
        if not tensor.is_leaf:
            raise SpecError(f'"{name}" is no parameter: it is computed, and autograd keeps no gradient for it')
        if tensor in seen:
            raise SpecError(f'"{name}" and "{seen[tensor]}" are the same tensor; give it once')
        seen[tensor] = name
    holder = holder_of(seen)
    if holder is not None:
        name = next(name for tensor, name in seen.items() if tensor in holder._index)
        raise CortadoError(f'"{name}" is attached already, with "{holder.spec}": its gradient would be averaged twice')


def _check_shards(trainable, group, plan):
    """fully_shard averages over the ranks it shards over; the Reducer's are those that hold the same shards."""
    replicas = set(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    use = 'process_group=mesh["replicate"].get_group(), and mesh=mesh["shard"] for fully_shard'
    for name, tensor, _ in trainable:
        if not is_sharded(tensor):
            raise SpecError(
                f'"{name}" is not sharded, and others are: its gradients differ within a replica, too, where a Reducer '
                "between replicas does not average. Shard it, or average it with a Reducer of its own over all ranks"
            )
        if all(placement.is_replicate() for placement in tensor.placements):
            raise SpecError(
                f'"{name}" is a DTensor and not sharded (replicate()): PyTorch averages its gradients itself'
            )
        both = replicas & set(tensor.device_mesh.mesh.flatten().tolist()) - {dist.get_rank()}
        if both:
            raise SpecError(
                f'"{name}" is sharded over ranks of this process group (this one and rank {min(both)}), whose '
                f"gradients fully_shard averages. Expected the group of those that hold the same shard: {use}"
            )
    if text_for_engine(plan).startswith("auto"):
        raise SpecError(
            f'"{plan}" with sharded parameters: the groups of the shards would measure and decide each by itself, and '
            'wait for each other meanwhile. Name a codec, such as "acp(rank=4)" or "quant(bits=4)", or give a plan'
        )


def _shards_held(parameters):
    """As text; ranks that average with each other hold the same."""
    held = set()
    for parameter in filter(is_sharded, parameters):
        mesh = parameter.device_mesh
        held.add(f"{tuple(mesh.get_coordinate())} of {tuple(mesh.mesh.shape)} by {parameter.placements}")
    return ", ".join(sorted(held))


def _shard_like(parameter, local):
    """``local`` as a gradient of ``parameter``."""
    if not is_sharded(parameter):
        return local
    return type(parameter).from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def _broadcast(tensors, group):
    """All become those of the group's first rank."""
    for tensor in map(local_of, tensors):
        value = tensor.contiguous().cpu()
        dist.broadcast(value, group=group, group_src=0)
        if value is not tensor:
            tensor.copy_(value)


def _hook_all(parameters, reducer):
    """Hooks that keep the Reducer no longer than its owner does."""

    def hook_for(index):
        def hook(_):
            alive = reducer()
            if alive is not None:
                alive._on_gradient(index)

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(i)) for i, p in enumerate(parameters)]


def _remove(handles):
    for handle in handles:
        handle.remove()
