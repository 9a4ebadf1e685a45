# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The adapter for torch.nn.parallel.DistributedDataParallel: a communication hook that feeds the C++ engine.

DDP calls the hook once a bucket, in an order that all ranks share. Each call hands the bucket's gradients to the
engine, which compresses them and starts the messages that became complete; the call for the last bucket waits for
everything, so that no thread of ours has a part in the exchange.
"""

import gc
import time
import weakref
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from . import _core
from .agreement import gather
from .attachment import Attachment, count_sender, holder_of, mark_closed, mark_open
from .errors import CortadoError, MismatchError, SpecError
from .group import DTYPE_CODES, takes_host_memory
from .parameters import IF_SHARDED, fsdp_hint, ignored_by_ddp, in_memory_order, trainable_of, without_compile

_states = weakref.WeakKeyDictionary()  # DDP module -> DdpState
_DDP_TIMEOUT_S = 1800.0  # of DDP's own waits, as process groups have it by default

_PYTHON_REDUCER = (
    'with torch._dynamo.config.optimize_ddp = "python_reducer" DDP hands over single gradients in place of buckets: '
    "set it to True, as it is by default, before DDP is made"
)


def attach(
    ddp,
    plan="auto",
    *,
    process_group=None,
    grad_scaler=None,
    check_replicas=0,
    check_collectives=False,
    timeout_s=None,
    verbose=True,
):
    """Makes ``ddp`` exchange its gradients as ``plan`` says; returns the state. Call it on every rank, before backward.

    ddp: the DistributedDataParallel, or what torch.compile made of it.
    plan: "auto" measures, decides, and goes on watching; "auto(quality=safe)", balanced (default) or aggressive says
        what it may use (docs/auto.md). Or a codec string such as "acp(rank=4)" or
        "topk(density=0.01) | quant(bits=4)", a dict such as {"codec": "acp", "rank": 4}, a Plan, or a path ending in
        .json of a file that holds such a dict or a plan.
    process_group: what the exchange runs over; default: DDP's own. Where that is of NCCL alone, which takes nothing in
        host memory: torch.distributed.new_group(backend="gloo"). Of the same ranks as DDP's.
    grad_scaler: the torch.amp.GradScaler (or anything with get_scale()) whose scale the gradients carry, if any.
    check_replicas: every so many steps a checksum of each parameter is compared over the ranks; 0: never.
    check_collectives: whether what arrives is compared with what the ranks sent, for links or memory that damage it;
        sums as far as rounding lets one tell (docs/training.md). An error then ends training on every rank.
    timeout_s: longest wait for a peer, in place of what a codec string says; a plan has none, and waits 1800 s.
    verbose: rank 0 prints one line about what is compressed and one about memory to stderr.

    The returned state has state_dict(), load_state_dict(), report(), decision(), check_replicas() and trace().
    """
    ddp = without_compile(ddp)
    is_ddp = isinstance(ddp, torch.nn.parallel.DistributedDataParallel)
    refusal = _refusal(ddp)
    if not dist.is_initialized():
        raise refusal or CortadoError("attach needs a process group: call torch.distributed.init_process_group first")
    of_ddp = ddp.process_group if is_ddp else None
    if process_group is None:
        process_group = of_ddp
    elif is_ddp and (wrong := _refuse_group(process_group, of_ddp)):
        if not takes_host_memory(of_ddp):
            raise wrong
        refusal = refusal or wrong
        process_group = of_ddp  # over it the others are told, if they gave none or a wrong one, too
    options = {
        "grad_scaler": grad_scaler,
        "check_replicas": check_replicas,
        "check_collectives": check_collectives,
        "timeout_s": timeout_s,
        "verbose": verbose,
    }
    keeps_hook = "" if refusal is not None else _why_hook_stays(ddp, process_group, check_replicas, check_collectives)
    state = DdpState(plan, ddp, process_group, refusal=refusal, keeps_hook=keeps_hook, **options)
    try:
        ddp.register_comm_hook(state, hook)
    except RuntimeError as error:
        raise CortadoError(f"DDP refuses a communication hook: {error}") from error
    if state.may_leave:
        ddp.register_forward_pre_hook(_BeforeForward(state))
        ddp.register_forward_hook(_AfterForward(state), prepend=True)  # before those that may raise
    _states[ddp] = state
    state.follow(ddp)
    return state


def _refusal(ddp):
    """The error that keeps this model from being attached, if any; told to all ranks before it is raised."""
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        hint = fsdp_hint(ddp)
        got = f"{type(ddp).__name__}{hint}{IF_SHARDED if hint else ''}"
        return SpecError(f"cortado.attach needs a torch.nn.parallel.DistributedDataParallel, got {got}")
    if ddp in _states:
        return CortadoError(f'this model is attached already, with "{_states[ddp].spec}"; build a new DDP to change it')
    holder = holder_of(ddp.parameters())
    if holder is not None and not isinstance(holder, DdpState):
        return CortadoError(f'a Reducer, with "{holder.spec}", averages these gradients already: close() it first')
    if (unsupported := _unsupported(ddp)) is not None:
        return unsupported
    hooks = getattr(ddp, "_comm_hooks", [])
    if any(not isinstance(state, DetachedState) for _, state in hooks):  # copies have none of the original's
        return CortadoError("this model has another communication hook, and DDP takes only one")
    if _has_run_backward(ddp):
        return CortadoError(
            "attach before the first backward: this model has gradients, or has exchanged some, already"
        )
    return None


def _unsupported(ddp):
    """The error of a DDP that was made with what no hook like this one can serve, if any."""
    if ddp.mixed_precision is not None:
        return SpecError("DDP's mixed_precision is a communication hook, and DDP takes only one: use torch.autocast")
    if ddp._delay_all_reduce_params:
        return SpecError(
            "with delay_all_reduce_named_params DDP averages these gradients itself, past any hook: leave it out"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        return SpecError(
            "with skip_all_reduce_unused_params DDP calls no hook for a bucket that no rank has used, and a step would "
            "wait for it for ever: leave it out; find_unused_parameters works without it"
        )
    if getattr(ddp, "_use_python_reducer", False):
        return SpecError(_PYTHON_REDUCER)
    return None


def ddp_hook(
    plan,
    model,
    *,
    process_group=None,
    grad_scaler=None,
    check_replicas=0,
    check_collectives=False,
    timeout_s=None,
    verbose=True,
):
    """The (state, hook) pair for ``ddp.register_comm_hook``.

    model is the module that will be wrapped (or the DDP itself); it gives the parameters their names. The other options
    are those of attach(), but for process_group: given the module alone, the exchange runs over the whole world, so
    say here, too, what DDP is given. The process group must be there already, and all ranks make the pair together;
    ``state.report()``, as cortado.report() knows attached models only.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise CortadoError("ddp_hook needs a process group: call torch.distributed.init_process_group first")
    chooses_group = process_group is None
    if chooses_group and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        process_group = model.process_group
    refusal = None
    if not isinstance(model, torch.nn.Module):
        swapped = "; the arguments are swapped" if isinstance(plan, torch.nn.Module) else ""
        refusal = SpecError(f"ddp_hook(plan, model) needs a torch.nn.Module, got {type(model).__name__}{swapped}")
    elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
        refusal = _unsupported(model)
    options = {
        "grad_scaler": grad_scaler,
        "check_replicas": check_replicas,
        "check_collectives": check_collectives,
        "timeout_s": timeout_s,
        "verbose": verbose,
    }
    state = DdpState(plan, model, process_group, refusal=refusal, **options)
    count_sender(state, 1)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        state._ddp = weakref.ref(model)
    else:
        state._meet = partial(_refuse_found, chooses_group)
    return state, hook


def _refuse_found(chooses_group, ddp, group):
    """The error of a DDP that turned out to use the hook of ddp_hook(plan, module), if any."""
    if wrong := _refuse_group(group, ddp.process_group):
        said = "exchanges over the whole world, if it is given none" if chooses_group else "was given another group"
        return SpecError(f"ddp_hook(plan, module) {said}: {wrong}")
    return _unsupported(ddp)


def _find_ddp(state):
    """The DDP whose hook has this state; None where it is not found."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.nn.parallel.DistributedDataParallel)}
    ddps = [found for found in objects if type(found) in kinds]
    return next((ddp for ddp in ddps if any(of is state for _, of in getattr(ddp, "_comm_hooks", ()))), None)


def report(attached):
    """The report of an attached model, of a state or of a Reducer."""
    if isinstance(attached, Attachment):
        return attached.report()
    if not isinstance(attached, torch.nn.Module):
        hint = f"; call its own report(): {type(attached).__name__}.report()" if hasattr(attached, "report") else ""
        raise SpecError(f"report needs an attached model, a state or a Reducer, got {type(attached).__name__}{hint}")
    state = _states.get(without_compile(attached))
    if state is None:
        raise CortadoError(
            "nothing to report: this model has not been attached (of ddp_hook, ask the state: state.report())"
        )
    return state.report()


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook."""
    return state.on_bucket(bucket)


class DdpState(Attachment):
    """One model's compression: what DDP passes to the hook. Make it with attach() or ddp_hook()."""

    takes_buffers = True

    def __init__(
        self, plan, model, process_group, *, refusal=None, keeps_hook="ddp_hook is not told of a DDP", **options
    ):
        self._can_average = not keeps_hook

        def list_parameters():
            if refusal is not None:
                raise refusal
            return _exchanged_by(model)

        super().__init__(plan, list_parameters, process_group, **options)
        self._places = {}  # by bucket index
        self._pending = []  # (future, buffer, its gradients in host memory, place) of this step's buckets
        self._step_begun = False
        self._copies = []  # gradients copied to undo a step
        self._touched = None  # from the first step on, where DDP looks for unused parameters
        self._leave = None  # while DDP averages gradients itself
        self._ddp = lambda: None  # where it is known
        self._meet = None  # of ddp_hook(plan, module), until the first step: what refuses the DDP that uses it
        if self._engine.is_auto:  # which passes no step with a shorter timeout, either
            self._keeps_hook = keeps_hook or ("timeout_s" if self._engine.timeout_s < _DDP_TIMEOUT_S else "")

    def follow(self, ddp):
        """It averages what is exchanged here, for as long as it is there."""
        self._ddp = weakref.ref(ddp)
        mark_open(self)
        count_sender(self, 1)
        weakref.finalize(ddp, mark_closed, self).atexit = False

    @property
    def may_leave(self):
        """Whether DDP is to exchange by itself where auto runs dense."""
        return self._engine.is_auto and not self._keeps_hook

    def __reduce__(self):
        # DDP holds its hook's state, so copies of it and files of it hold what stands for it.
        return DetachedState, (self.spec,)

    def on_bucket(self, bucket):
        if not self._step_begun:
            self._refuse_capture()  # before anything is sent: no reason to end the exchange
        if not isinstance(bucket, dist.GradBucket):
            raise SpecError(_PYTHON_REDUCER)
        start_ns = time.perf_counter_ns()
        with self._errors_end_all():
            future = self._exchange(bucket)
        self._hook_ns += time.perf_counter_ns() - start_ns
        if self._stale and not self._has_warned and not self._step_begun:
            _behind_ddp(self._warn_of_stale)  # which may be an error
        return future

    def _exchange(self, bucket):
        self._refuse_capture()
        buffer = bucket.buffer()
        if buffer.is_sparse or buffer.device != self._device:
            raise SpecError(
                f"cortado exchanges dense gradients, of a model that was on {self._device} when it was attached; this "
                f"bucket is {buffer.layout} on {buffer.device}"
            )
        if self._meet is not None:
            self._meet_ddp()
        if not self._step_begun:
            self._begin(bucket)
        place = self._place(bucket, buffer)
        host = buffer
        if not self._transfers.in_place:
            host = place.host_copy(buffer, self._transfers)
            self._transfers.fetch(host, buffer)
        future = self._transfers.future()
        self._pending.append((future, buffer, host, place))  # before the engine has it: a Ctrl-C may come at any time
        self._transfers.when_fetched(partial(self._submit, place, host))
        if bucket.is_last():
            self._finish()
        return future

    def _meet_ddp(self):
        meet, self._meet = self._meet, None
        ddp = _find_ddp(self)
        if ddp is not None:
            if (refusal := meet(ddp, self._group._group)) is not None:
                raise refusal
            self._ddp = weakref.ref(ddp)

    def _submit(self, place, host):
        if self._touched is not None:
            for index, offset in place.offsets.items():
                if not self._touched.flags[index]:
                    start = offset // host.itemsize
                    self._note_stale(index, host[start : start + self._parameters[index].numel()])
        if self._submits_buffers:
            self._engine.submit_buffer(place.map, host.data_ptr(), host.numel(), DTYPE_CODES[host.dtype])
        else:
            self._engine.submit(place.map, host.data_ptr())

    def _end_broken_step(self):
        self._fail(CortadoError("its step was broken off: its backward pass ended before DDP's"))

    def _memory_in_use(self):
        return [(buffer, host) for _, buffer, host, _ in self._pending]

    def _begin(self, bucket):
        # On a device the bucket itself stays as it is until the step has ended.
        has_joined = self._has_joined()
        keeps = not self._transfers.in_place or (not has_joined and self._keeps_gradients(bucket))
        self._begin_step(keeps, partial(self._somebody_is_without_data, bucket) if has_joined else None)
        self._step_begun = True

    def _has_joined(self):
        """In ddp.join() ranks without data take part with zeros, beside gradients and parameters of earlier steps.
        DDP does not tell when that has ended."""
        ddp = self._ddp()
        return ddp is not None and ddp._join_config.enable

    def _somebody_is_without_data(self, bucket):
        return any(gather(self._group, bytes([not bucket.buffer().any()]), self._engine.timeout_s))

    @staticmethod
    def _keeps_gradients(bucket):
        """True if DDP keeps the local gradients beside its bucket (gradient_as_bucket_view=False)."""
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.grad is not None and view.numel():
                return parameter.grad.data_ptr() != view.data_ptr()
        return False

    def _place(self, bucket, buffer):
        """Where each tensor lies in the bucket; kept until DDP rebuilds its buckets."""
        parameters = bucket.parameters()
        known = self._places.get(bucket.index())
        if known is not None and len(known.parameters) == len(parameters):
            if all(a is b for a, b in zip(known.parameters, parameters, strict=True)):
                return known
        if known is not None:
            self._places.clear()
        tensors, offsets = [], []
        for parameter, view in zip(parameters, bucket.gradients(), strict=True):
            index = self._index.get(parameter)
            if index is None:
                raise self._refuse_stranger(parameter)
            self._check_like_parameter(index, view)
            tensors.append(index)
            offsets.append(view.data_ptr() - buffer.data_ptr() if view.numel() else 0)
        made = _Place(parameters, dict(zip(tensors, offsets, strict=True)), _core.BucketMap(tensors, offsets))
        self._places[bucket.index()] = made
        return made

    def _refuse_stranger(self, parameter):
        ddp = self._ddp()
        names = {} if ddp is None else {p: name for name, p in ddp.module.named_parameters()}
        if parameter in names and not parameter.requires_grad:
            return MismatchError(
                f'DDP exchanges the gradient of "{names[parameter]}", which was frozen after DDP was made: '
                "requires_grad_(False) belongs before it"
            )
        return MismatchError(
            f"a gradient of shape {tuple(parameter.shape)} belongs to no named parameter of the model that cortado was "
            "given; residuals are kept by name"
        )

    def _check_like_parameter(self, index, view):
        _, code, rows, cols, *_ = self._tensors[index]
        if DTYPE_CODES.get(view.dtype) != code or view.numel() != rows * cols:
            dtype = next(dtype for dtype, its_code in DTYPE_CODES.items() if its_code == code)
            parameter = self._parameters[index]
            what_to_do = "Convert the model first"
            if parameter.dtype == dtype and parameter.numel() == rows * cols:
                what_to_do = (
                    "Another hook has changed it, such as fp16_compress_wrapper: none can stand around this one. What "
                    'such hooks do a plan does: "acp(rank=4, wire=fp16)", "cast(fp16)"'
                )
            raise MismatchError(
                f'the gradient of "{self._names[index]}" has {view.numel()} elements of {view.dtype}; when cortado was '
                f"given the model, the parameter had {rows * cols} of {dtype}. {what_to_do}"
            )

    def _finish(self):
        self._transfers.hand_over_all()
        self._finish_step(self._local_gradient if self._transfers.in_place else self._gradient_on_device)
        pending, self._pending = self._pending, []
        self._step_begun = False
        self._copies.clear()
        for future, buffer, host, _ in pending:
            if host is not buffer:
                self._transfers.send(buffer, host)
            self._transfers.complete(future, buffer)
        self._watch_for_stale()

    def _watch_for_stale(self):
        ddp = self._ddp()
        if self._touched is not None:
            self._touched.clear()
            if self._stale is not None:  # it is said once
                self._touched = None
        elif self._stale is None and ddp is not None and ddp.find_unused_parameters and not ddp.static_graph:
            self._touched = _Touched(self._parameters)

    def _local_gradient(self, index):
        """Address of the gradient that DDP kept for tensor ``index``, in the memory order of its bucket; 0 if None."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return 0
        gradient = in_memory_order(parameter, gradient)
        self._copies.append(gradient)
        return gradient.data_ptr()

    def _gradient_on_device(self, index):
        """The same, of gradients on a device, where they are still in their bucket."""
        for _, buffer, _, place in self._pending:
            if index in place.offsets:
                start = place.offsets[index]
                end = start + self._parameters[index].nbytes
                self._copies.append(self._transfers.read(buffer.view(torch.uint8)[start:end]))
                return self._copies[-1].data_ptr()
        return 0

    # ---- auto's dense steps, which DDP makes by itself

    def before_forward(self, ddp):
        """Of a forward pass whose gradients will be exchanged."""
        self._keeps_hook = self._keeps_hook or _switch_that_finds_unused(ddp)  # may be set after attach, too
        leaves = self._engine.may_pass and not self._keeps_hook
        # A new reducer is made for what is trained just now, and a discriminator's parameters may be frozen.
        if leaves != (self._leave is not None) and all(p.requires_grad for p in self._parameters):
            with self._errors_end_all():  # nothing is sent: a rank may come here earlier, evaluating with gradients
                self._swap(ddp)

    def after_forward(self):
        """The same, once it has come to its end: one that raises, and may be tried again in parts, is followed by no
        exchange."""
        if self._leave is not None:
            self._leave.expect()

    def stop_watching(self):
        """What was expected of a forward pass before, perhaps of one rank alone, does not count."""
        if self._leave is not None:
            self._leave.expect(False)

    def _swap(self, ddp):
        if self._leave is None:
            _take_back(ddp, self)
            self._leave = _Leave(ddp, self._parameters[0], self._pass_step)
        else:
            ddp.register_comm_hook(self, hook)
            self._leave.end()
            self._leave = None

    def _pass_step(self):
        with self._errors_end_all():
            self._engine.pass_step()
        self._steps_begun += 1
        self._tell_news()


class _Leave:
    """While DDP exchanges by itself: calls ``step_ended`` at the end of each backward pass that has exchanged. Every
    parameter's node is reached in it, with a gradient or without, so that one of them sees it, as DDP does."""

    def __init__(self, ddp, parameter, step_ended):
        self._ddp = weakref.ref(ddp)  # until its buckets are laid out
        self._step_ended = weakref.WeakMethod(step_ended)
        self._is_expected = False
        note = weakref.WeakMethod(self._note)
        with torch.enable_grad():
            self._node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        self._handle = self._node.register_hook(lambda *_: (call := note()) and call())
        weakref.finalize(self, self._handle.remove).atexit = False  # the node may outlive this

    def expect(self, expected=True):
        """The next backward pass exchanges, as DDP does when a forward pass outside of no_sync() has ended before."""
        self._is_expected = expected

    def end(self):
        self._handle.remove()

    def _note(self):
        if self._is_expected:
            self._is_expected = False
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)

    def _end_step(self):
        step_ended = self._step_ended()
        if step_ended is not None:
            step_ended()
        if self._ddp is not None:
            torch.autograd.Variable._execution_engine.queue_callback(self._lay_out)

    def _lay_out(self):
        """Behind DDP's own end of the first backward pass, where all ranks are: DDP broadcasts how it lays its buckets
        out anew, and would do so in the next forward pass with gradients, which may be one rank's evaluation."""
        ddp, self._ddp = self._ddp and self._ddp(), None
        try:
            if ddp is not None and ddp.reducer._rebuild_buckets():
                ddp._has_rebuilt_buckets = True
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            self._ddp = weakref.ref(ddp)  # it has not ended: this pass is within another one. In the next step, then


def _behind_ddp(call):
    """Makes the call at the end of this backward pass, when DDP has ended its own."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(call))


class _Touched:
    """Which parameters backward passes have given a gradient since clear(), those in no_sync() too. A frozen one takes
    no hook: it counts as touched until it is trained at the end of a step."""

    def __init__(self, parameters):
        self.flags = bytearray(len(parameters))
        self._unwatched = dict(enumerate(parameters))
        self._handles = []
        weakref.finalize(self, _remove, self._handles)
        self.clear()

    def clear(self):
        self.flags[:] = bytes(len(self.flags))
        for index, parameter in tuple(self._unwatched.items()):
            if parameter.requires_grad:
                hook = partial(_touch, self.flags, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                del self._unwatched[index]
            else:
                self.flags[index] = 1


def _touch(flags, index, _):
    flags[index] = 1


def _remove(handles):
    for handle in handles:
        handle.remove()


class _ForwardHook:
    """Of a model under auto; in copies of the model, which are not attached, it does nothing."""

    def __init__(self, state=None):
        self._state = None if state is None else weakref.ref(state)

    def __reduce__(self):
        return type(self), ()

    def _state_if_exchanged(self, ddp):
        """Of a forward pass whose gradients DDP will exchange; else None."""
        exchanges = torch.is_grad_enabled() and ddp.require_backward_grad_sync
        return self._state() if exchanges and self._state is not None else None


class _BeforeForward(_ForwardHook):
    @torch.compiler.disable
    def __call__(self, ddp, _):
        state = self._state_if_exchanged(ddp)
        if state is None:
            return
        # In ddp.join() ranks that have no data left make no passes. The module is not told when it has ended.
        if ddp._join_config.enable:
            state.stop_watching()
        else:
            state.before_forward(ddp)


class _AfterForward(_ForwardHook):
    @torch.compiler.disable
    def __call__(self, ddp, _, __):
        state = self._state_if_exchanged(ddp)
        if state is not None and not ddp._join_config.enable:
            state.after_forward()


def _refuse_group(process_group, of_ddp):
    """The error that keeps the exchange from running over this group in place of DDP's own, if any."""
    ranks = dist.get_process_group_ranks(process_group) if isinstance(process_group, dist.ProcessGroup) else None
    wanted = dist.get_process_group_ranks(of_ddp)
    if ranks == wanted:
        return None
    got = repr(process_group) if ranks is None else f"ranks {ranks}"
    return SpecError(f"process_group must be a process group of the ranks of DDP's own, {wanted}; got {got}")


def _why_hook_stays(ddp, process_group, check_replicas, check_collectives):
    """What keeps DDP from exchanging by itself where auto runs dense; empty: nothing. Every parameter must see every
    step, and the host its end."""
    reasons = {
        "check_replicas": check_replicas,
        "check_collectives": check_collectives,
        "a subclass of DistributedDataParallel": type(ddp) is not torch.nn.parallel.DistributedDataParallel,
        "a process group that is not the default one": any(
            group is not dist.group.WORLD for group in (process_group, ddp.process_group)
        ),
        "gradients on a device": any(p.device.type != "cpu" for p in ddp.parameters()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "") or _switch_that_finds_unused(ddp)


def _switch_that_finds_unused(ddp):
    """The one with which DDP finds out what is used, so that a step need not give every gradient; empty: none."""
    return next((name for name in ("find_unused_parameters", "static_graph") if getattr(ddp, name)), "")


def _take_back(ddp, state):
    """Between steps: DDP without the hook. It takes none back, but restores itself, as after unpickling."""
    torch.nn.parallel.DistributedDataParallel.__setstate__(ddp, {})
    if ddp.static_graph:  # the first step of a reducer is another one
        ddp._static_graph_delay_allreduce_enqueued = False
    ddp._comm_hooks[:] = [entry for entry in ddp._comm_hooks if entry[1] is not state]


class DetachedState:
    """The state of an attached model in a copy of that model, or in a file, which is not attached. spec: of the
    original."""

    def __init__(self, spec):
        self.spec = spec

    def on_bucket(self, _):
        raise CortadoError(
            "this state came out of a copy or a pickle, which hold nothing of the original's: save state.state_dict() "
            "on every rank, make a new state with attach() or ddp_hook(), and give it that with load_state_dict()"
        )


@dataclass
class _Place:
    """What one bucket holds."""

    parameters: list
    offsets: dict  # bytes, by tensor index
    map: _core.BucketMap
    host: torch.Tensor | None = None  # of gradients on a device: where they are copied to

    def host_copy(self, buffer, transfers):
        if self.host is None:
            self.host = transfers.host_memory(buffer)
        return self.host


def _exchanged_by(model):
    """What DDP exchanges of a model, or will."""
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    names = model.parameters_to_ignore if is_ddp else getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    module = model.module if is_ddp else model
    return trainable_of(module, ignored_by_ddp(module, set(names)))


def _has_run_backward(ddp):
    return any(p.grad is not None for p in ddp.parameters()) or any(ddp.reducer.get_backward_stats())
