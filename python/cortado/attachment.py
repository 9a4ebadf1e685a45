# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What every front end is: one engine over one process group, and how errors of a rank reach the others."""

import contextlib
import re
import struct
import sys
import warnings
import weakref
from functools import partial

import torch

from . import _core
from .agreement import SETUP_TIMEOUT_S, agree_on_flag, damage_ends_all, on_all_ranks
from .device_engine import compute_stream_of, place_of_engine
from .errors import CortadoError, MismatchError, SpecError, sendable, without_frames
from .group import TorchGroup
from .parameters import engine_tensors, is_later_shard, local_of
from .reporting import Report
from .saved_state import array_of, check_is, check_state
from .side_stream import device_of, is_capturing, side_stream_of
from .spec import text_for_engine
from .trace import Trace
from .transfers import DeviceEngineTransfers, DeviceTransfers, HostTransfers

_STATE_FORMAT = "cortado.state/1"
_STATE_KEYS = ("residual", "basis", "velocity")  # of each tensor, beside its places

_NOTHING = _core.BucketMap([], [])

_kept = []  # what collectives of broken steps may still read and write; until the process ends
_open = weakref.WeakSet()
_senders = weakref.WeakKeyDictionary()  # by process group: how many attachments were made on it and not closed
_in_step = weakref.WeakSet()


def mark_open(attachment):
    """The gradients of its parameters are averaged by this attachment now."""
    _open.add(attachment)


def mark_closed(attachment):
    _open.discard(attachment)


def count_sender(attachment, change):
    """Where all ranks are, as they make attachments and close Reducers: what is merely dropped, each collects when it
    likes."""
    group = attachment._group._group
    _senders[group] = _senders.get(group, 0) + change


def is_open(attachment):
    return attachment in _open


def holders_of(parameters):
    """All open attachments that average the gradient of one of ``parameters``, in an order of this process alone."""
    parameters = list(parameters)
    attachments = tuple(_open)  # one may go meanwhile
    return [one for one in attachments if any(parameter in one._index for parameter in parameters)]


def holder_of(parameters):
    """One of holders_of(), or None."""
    return next(iter(holders_of(parameters)), None)


def without_holder(parameters):
    """Those of ``parameters`` whose gradients no open attachment averages."""
    attachments = tuple(_open)
    return [p for p in parameters if not any(p in attachment._index for attachment in attachments)]


class Attachment:
    """The engine, and what users of every front end call. Made on every rank at the same time.

    list_parameters: returns what parameters.trainable_of() does, or raises; an error is raised on all ranks.
    takes_buffers: whole buffers of gradients are handed over (auto may sum them as they are). _can_average: who hands
    them over could average them itself (auto may leave dense steps to it). The other options are described at attach().
    """

    takes_buffers = False
    _can_average = False
    _keeps_hook = ""
    _step_begun = False

    def __init__(
        self,
        plan,
        list_parameters,
        process_group,
        *,
        grad_scaler=None,
        check_replicas=0,
        check_collectives=False,
        timeout_s=None,
        verbose=True,
    ):
        for other in tuple(_in_step):
            other._end_broken_step()
        self._group = TorchGroup(process_group)
        self._grad_scaler = grad_scaler
        self._check_interval = check_replicas
        self._checks_collectives = check_collectives
        self._timeout_s = timeout_s
        self._steps_begun = 0
        self._first_step = 0  # what the first of them is called
        self._scale_in_use = None
        self._engine = self._make_engine(plan, list_parameters)
        if self._group.world_size == 2 or self._is_plan or self._engine.is_auto:  # else no two send each other much
            self._group.connect_both_ways()
        self._group.set_timeout(self._engine.timeout_s)
        self._transfers = self._make_transfers()
        self.spec = self._engine.spec
        self._failure = None  # what ended the exchange
        self._hook_ns = 0  # of this rank's thread in the calls of autograd
        self._stale = None  # name of a parameter whose gradient of an earlier step was exchanged again
        self._has_warned = False  # of it
        self._owed = (0, frozenset())  # step, and names of what may have a residual in it
        self._is_first = self._group.rank == 0 and not any(map(is_later_shard, self._parameters))
        self._speaks = verbose and self._is_first
        if self._speaks:
            print(self._engine.describe(), file=sys.stderr, flush=True)
            if why := self._why_on_host(self._engine.report()["host_reason"]):
                print(f"cortado: gradients on {self._device} are copied to the CPU: {why}", file=sys.stderr)

    def _make_engine(self, plan, list_parameters):
        is_time = isinstance(self._timeout_s, int | float) and 0.001 <= self._timeout_s <= 1e6
        setup_timeout_s = max(SETUP_TIMEOUT_S, self._timeout_s if is_time else 0)
        with on_all_ranks(self._group, "could not attach", setup_timeout_s):
            named = list_parameters()
            if not isinstance(self._check_interval, int) or not 0 <= self._check_interval < 2**63:
                raise SpecError(f"check_replicas is a number of steps, or 0 for never; got {self._check_interval!r}")
            if self._timeout_s is not None and not is_time:
                raise SpecError(f"timeout_s is from 0.001 to 1e6 seconds, or None; got {self._timeout_s!r}")
            if self._grad_scaler is not None and not callable(getattr(self._grad_scaler, "get_scale", None)):
                got = repr(self._grad_scaler)
                raise SpecError(f"grad_scaler is a torch.amp.GradScaler or has get_scale(), or is None; got {got}")
            what = text_for_engine(plan)
            self._tensors = tensors = engine_tensors(named)
            self._device = device_of(named)
            self._engine_place = place_of_engine(self._device, what)
            self._is_plan = what.startswith("{")
            self._side_stream = None if self._engine_place.library else side_stream_of(self._device)
        self._names = [name for name, _, _ in named]
        self._parameters = [parameter for _, parameter, _ in named]
        self._index = {parameter: i for i, parameter in enumerate(self._parameters)}
        self._agree_on_arguments(setup_timeout_s)
        group = self._group
        version = f"torch {torch.__version__}"
        with damage_ends_all(group):
            return _core.Engine(
                tensors,
                what,
                group,
                group.rank,
                group.world_size,
                group.name,
                self.takes_buffers,
                self._can_average,
                version,
                self._timeout_s,
                self._checks_collectives,
                self._engine_place.library or self._engine_place.schemes,
                self._device.index or 0,
            )

    def _make_transfers(self):
        if self._engine_place.library:
            return DeviceEngineTransfers(compute_stream_of(self._device))
        if self._side_stream is None:
            return HostTransfers()
        return DeviceTransfers(self._side_stream, self._poll, self._group, self._engine.timeout_s)

    @property
    def _submits_buffers(self):
        if self._engine_place.library:
            return False
        return self._engine.sends_buffers or (self.takes_buffers and self._engine.is_auto)

    def _poll(self):
        """Lets the engine take in what has arrived from peers."""
        if self._submits_buffers:
            self._engine.submit_buffer(_NOTHING, 0, 0, 0)
        else:
            self._engine.submit(_NOTHING, 0)

    def _agree_on_arguments(self, timeout_s):
        own = struct.pack("<?q", self._grad_scaler is not None, self._check_interval)
        gathered = self._group.all_gather(own, timeout_s)
        scaled, intervals = zip(*struct.iter_unpack("<?q", gathered), strict=True)
        if len(set(scaled)) > 1:
            without = ", ".join(str(rank) for rank, has in enumerate(scaled) if not has)
            raise MismatchError(f"some ranks were attached with a grad_scaler, rank {without} without")
        if len(set(intervals)) > 1:
            raise MismatchError(f"check_replicas differs: ranks have {', '.join(map(str, intervals))}")
        agree_on_flag(self._group, "check_collectives", self._checks_collectives, timeout_s)

    def _fail(self, error):
        """An error within a step ends the exchange: the other ranks hear of it, and no further step is possible."""
        is_first, self._failure = self._failure is None, self._failure or without_frames(error)
        mark_closed(self)
        _in_step.discard(self)
        if is_first and self._step_begun:
            _kept.append((self._engine, self._memory_in_use()))
        try:
            self._engine.abandon(sendable(str(error)))
        except CortadoError:  # another thread is in the engine, and hears of it as the peers do
            self._group.announce(str(error))

    @contextlib.contextmanager
    def _errors_end_all(self):
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _memory_in_use(self):
        """What collectives of the step in hand may use beside the engine's own memory. Not the parameters."""
        return []

    def __del__(self):
        """Dropped within a step, as after an error in the backward pass: peers wait, and what is on its way is written
        to memory that this holds."""
        if self._is_in_step and self._failure is None and not sys.is_finalizing():
            self._fail(CortadoError(f"{type(self).__name__} was dropped within a step"))

    def _refuse_capture(self):
        """A graph would hold copies and kernels of this one step, and nothing of what the host does for it."""
        if is_capturing(self._device):
            raise CortadoError(
                "a CUDA graph is being captured, which can't hold the exchange of gradients: the host decides in every "
                "step what is sent, and waits for peers. Capture modules instead, before DDP wraps them or a Reducer "
                "takes them: torch.cuda.make_graphed_callables(module, sample_args). Their gradients are exchanged "
                "outside of the graphs"
            )

    def _begin_step(self, keeps_local_gradients=False, somebody_has_no_data=None):
        """``somebody_has_no_data``: where a check is due all ranks ask it, and leave the check out."""
        self._refuse_another_in_step()
        _in_step.add(self)
        if self._check_interval and self._steps_begun % self._check_interval == 0:
            if somebody_has_no_data is None or not somebody_has_no_data():
                self.check_replicas()
        self._steps_begun += 1
        self._transfers.begin(partial(self._open_step, keeps_local_gradients))

    @property
    def _step(self):
        """The step begun last, by the engine's number."""
        return self._first_step + self._steps_begun - 1

    @property
    def _is_in_step(self):
        """Whether peers wait for the rest of a step, or will."""
        return self._step_begun

    @property
    def _shares_group(self):
        """Whether another attachment may send on the same process group; the same on all ranks."""
        return self._group.world_size > 1 and _senders.get(self._group._group, 0) > 1

    @property
    def _starts_by_arrival(self):
        """Whether its collectives start when others have arrived or a device has got so far, in some call of the hooks
        or another. Among each other they have one order on all ranks, among those of others none."""
        return self._is_plan or self._engine.is_auto or not isinstance(self._transfers, HostTransfers)

    def _end_broken_step(self):
        """Called between steps of what ends its own within a backward pass."""

    def _refuse_another_in_step(self):
        if self._group.world_size == 1:
            return
        for other in tuple(_in_step):  # one may go meanwhile
            if other is self or not other._group.shares_order_with(self._group):
                continue
            if self._starts_by_arrival or other._starts_by_arrival:
                raise CortadoError(
                    f'"{other.spec}" is in its step on the process group on which "{self.spec}" is to begin one. With '
                    "plans, auto, and gradients on a device, collectives start when others have arrived, so those of "
                    "both would come in orders that differ between ranks. Give one a group of its own, of the same "
                    "ranks: process_group=torch.distributed.new_group(); or let it finish its step first; "
                    "if that was broken off, drop it"
                )

    def _open_step(self, keeps_local_gradients):
        scale, place = self._gradient_scale()
        # Nothing arrives for a parameter that no rank has used (DDP drops it), so nothing may be owed.
        stream = self._transfers.device_stream
        self._engine.begin_step(
            scale,
            keeps_local_gradients,
            holds_zero_gradients=True,
            device_stream=stream,
            device_gradient_scale=place,
        )

    def _gradient_scale(self):
        """The scale of the loss and 0; or, where an engine on the device reads it there, 1 and its address."""
        if self._grad_scaler is None:
            return 1.0, 0
        scale = getattr(self._grad_scaler, "_scale", None) if self._engine_place.library else None
        if isinstance(scale, torch.Tensor) and scale.device == self._device and scale.dtype == torch.float32:
            self._scale_in_use = scale
            return 1.0, scale.data_ptr()
        return float(self._grad_scaler.get_scale()), 0

    def _finish_step(self, *arguments):
        self._engine.finish_step(*arguments)
        _in_step.discard(self)
        self._tell_news()

    def _note_stale(self, index, gradient):
        """Of a parameter that no backward pass of this step has used here. What is left in its gradient from earlier
        ones is taken for a new one: what is owed to it leaves, and no optimizer takes it."""
        if self._stale is not None or gradient.device.type != "cpu" or not gradient.any():
            return
        if self._owed[0] != self._steps_begun:
            report = self._engine.report()
            dense = {fallback["tensor"] for fallback in report["fallbacks"]}
            names = set(self._names) - dense if report["memory_bytes"]["residual"] else ()
            self._owed = self._steps_begun, frozenset(names)
        if self._names[index] in self._owed[1]:
            self._stale = self._names[index]

    def _warn_of_stale(self):
        if self._stale and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f'cortado: rank {self._group.rank}, step {self._step}: "{self._stale}" was not used, but '
                "its gradient of an earlier step was there and was exchanged again, and with it what is owed to it. "
                "Zero the gradients of all optimizers before each backward pass. (Said once.)",
                stacklevel=2,
            )

    def _tell_news(self):
        if self._engine.is_auto:
            news = self._engine.take_news()
            if news:
                self.spec = self._engine.spec
            for line in news if self._speaks else ():
                print(line, file=sys.stderr, flush=True)

    # ---- what users call

    def report(self):
        """What was sent, lost and not compressed so far, on this rank."""
        times = {"hook_ns": self._hook_ns, "device_wait_ns": self._transfers.wait_ns}
        report = self._engine.report()
        reason = self._why_on_host(report.pop("host_reason"))
        on_device = self._engine_place.library and not reason
        runs_on = {"gradients": str(self._device), "engine": "device" if on_device else "cpu"}
        if reason:
            runs_on["reason"] = reason
        return Report(
            {**report, **times, "runs_on": runs_on, "auto": self._engine.decision(), "hook_stays": self._keeps_hook}
        )

    def _why_on_host(self, host_reason):
        """Why gradients on a device are copied to the host, and what encodes there; ``host_reason``: the engine's."""
        if host_reason and self._engine_place.why_no_schemes:
            host_reason += f" ({self._engine_place.why_no_schemes})"
        return "; ".join(filter(None, (self._engine_place.reason, host_reason)))

    def decision(self):
        """What auto has decided and why, as a dict; None without auto.

        ``decided``, ``step``, ``reason``, ``candidates`` (the first one is dense), ``chosen`` (which of them), and of
        the last comparison ``step_ns`` (what a step takes now), ``drift`` (that over what was measured on trial, less
        1), ``relative_error`` and ``residual`` (its norm, in gradients). A candidate has ``label``, ``what``,
        ``predicted_ns`` (of what was tried: said in each of its trials, before the steps that count; simulated for a
        machine as fast as in the last five and in the trials so far, times what the other settings tried took over what
        was simulated of them; the median of these), ``simulated_ns`` (the same without what others took),
        ``measured_ns``, ``steps``, ``trials_ns`` (the median of each trial's steps), ``pace`` (how long it was in its
        steps from the end of one to the first gradients of the next, over what the prediction expects of that: above 1
        the machine was slower), and ``predicted_at_pace_ns`` (the prediction for steps of that pace). ``simulated_ns``,
        ``pace`` and ``predicted_at_pace_ns`` are None of dense, of what was not tried or not predicted, and once it has
        been tried again.
        """
        return self._engine.decision()

    def _refuse_within_step(self, what):
        if self._is_in_step and not self._step_begun:  # which the engine does not know yet
            raise CortadoError(f"{what}: a step is under way")

    def state_dict(self):
        """This rank's residuals, factors, velocities and step, keyed by parameter name; every rank saves its own."""
        self._refuse_within_step("save_state")
        state = self._engine.save_state()
        for entry in state["tensors"].values():
            entry.update(_tensors_of(entry, _STATE_KEYS))
            entry["places"] = _tensors_of(entry["places"], entry["places"])
        return state

    def load_state_dict(self, state):
        """Continues where state_dict() was taken. Call it on every rank, each with its own rank's state.

        With another world size residuals start at zero and a warning says so; everything else is kept. Auto measures
        again there, and where the state's setting is not allowed at the quality asked for here; a plan is of one world
        size.
        """
        with on_all_ranks(self._group, "could not load its state", self._engine.timeout_s):
            self._refuse_within_step("load_state")
            arrays = _arrays_of(state)
        with damage_ends_all(self._group):
            warning = self._engine.load_state(arrays)
        of_auto = re.match(r"auto, step (\d+)", state["spec"])  # which counts dense steps that DDP makes, too
        self._first_step = (int(of_auto[1]) if of_auto else state["step"]) - self._steps_begun
        self.spec = self._engine.spec
        if warning and self._is_first:
            print(f"cortado: {warning}", file=sys.stderr, flush=True)

    def switch_plan(self, plan):
        """From the next step on ``plan`` (a Plan, its content, or the path of its file) is executed.

        For models that were attached with a plan. Call it on every rank before the same step; if the ranks differ in
        plan or step, all get a MismatchError and go on as before. Residuals are carried over.
        """
        with on_all_ranks(self._group, "could not switch its plan", self._engine.timeout_s):
            text = text_for_engine(plan)
            if not text.startswith("{"):
                raise SpecError(f'switch_plan needs a plan, got the codec "{text}"')
        with damage_ends_all(self._group):
            self._engine.switch_plan(text)
        self.spec = self._engine.spec

    def check_replicas(self, model=None):
        """Compares a checksum of every parameter over the ranks; call it on every rank, between steps.

        model: its parameters are compared, those without gradients too; default: the parameters exchanged here.
        Where some differ, every rank gets a MismatchError that names the step, the first such parameter, and the rank.
        """
        named = zip(self._names, self._parameters, strict=True) if model is None else model.named_parameters()
        kept = [(name, local_of(tensor).detach().contiguous().cpu()) for name, tensor in named]
        self._engine.check_replicas([(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in kept])

    def start_trace(self, capacity=100_000):
        """Records up to ``capacity`` stage events from the next step on."""
        self._engine.start_trace(capacity)

    def trace(self):
        """What has been recorded since start_trace(), on this rank; a cortado.Trace."""
        return Trace(self._engine.trace_json())

    def write_trace(self, path):
        """Writes the recorded events as a Chrome trace."""
        self.trace().save_chrome(path)


def _tensors_of(arrays, keys):
    return {key: torch.from_numpy(arrays[key]) for key in keys}


def _arrays_of(state):
    """The state with numpy arrays in place of tensors."""
    numbers = dict.fromkeys(("world_size", "rank", "step", "phase_step"), int)
    check_state(state, _STATE_FORMAT, spec=str, **numbers, layout=list, tensors=dict)
    _check_layout(state["layout"])
    tensors = {}
    for name, entry in state["tensors"].items():
        place = f'tensors["{name}"]'
        check_is(f"{name!r} in tensors", name, str)
        check_is(place, entry, dict)
        entry = {"velocity": torch.empty(0), "places": {}, **entry}  # states of earlier versions lack them
        if missing := [key for key in _STATE_KEYS if key not in entry]:
            raise MismatchError(f"load_state_dict: {place} of the state lacks {', '.join(missing)}")
        check_is(f'{place}["places"]', entry["places"], dict)
        tensors[name] = {key: array_of(f'{place}["{key}"]', entry[key]) for key in _STATE_KEYS}
        tensors[name]["places"] = {
            _place_key(place, key): array_of(f'{place}["places"]["{key}"]', values)
            for key, values in entry["places"].items()
        }
    return {**state, "tensors": tensors}


def _check_layout(layout):
    """Names by phase, message and slot."""
    for p, messages in enumerate(layout):
        check_is(f"layout[{p}]", messages, list)
        for m, names in enumerate(messages):
            check_is(f"layout[{p}][{m}]", names, list)
            for s, name in enumerate(names):
                check_is(f"layout[{p}][{m}][{s}]", name, str)


def _place_key(place, key):
    if not isinstance(key, str) or not re.fullmatch(r".*@[0-9]{1,18}", key, re.DOTALL):
        raise MismatchError(
            f'load_state_dict: {place}["places"] of the state: expected a place as NAME@BEGIN, got {key!r}'
        )
    return key
