# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""K-FAC for torch models: hooks that hand activations and output gradients to the C++ side, and the step."""

import contextlib
import gc
import logging
import math
import sys
import time
import weakref

import torch
import torch.distributed as dist

from . import _core
from .agreement import SETUP_TIMEOUT_S, agree_on_flag, agree_on_text, damage_ends_all, on_all_ranks
from .attachment import Attachment, holder_of, holders_of, is_open, without_holder
from .calibration import calibrate
from .errors import CortadoError, MismatchError, PeerError, SpecError
from .group import DTYPE_CODES, TorchGroup
from .kfac_device import Batches, device_of_layers, place_of_kfac
from .kfac_layers import find_layers
from .kfac_options import (
    HYPERPARAMETERS,
    check_types,
    choose_strategy,
    counted,
    hyperparameter,
    is_scaled_still,
    one_of,
    scale_function,
    skips_steps,
    warn,
    without_effect,
)
from .parameters import fsdp_hint, without_compile
from .profiles import Cluster
from .reducer import Reducer
from .reporting import KfacReport
from .saved_state import array_of, check_is, check_state
from .side_stream import address_of_current_stream
from .spec import spec_from

_STATE_FORMAT = "cortado.kfac/1"
_CALIBRATION_S = 10.0
_NO_BACKWARD_PASS = -1

_holders = weakref.WeakKeyDictionary()  # module -> a reference to the KFAC whose hooks it has


class KFAC:
    """Preconditions the gradients of a model with K-FAC, between ``loss.backward()`` and ``optimizer.step()``.

        kfac = cortado.KFAC(model, damping=1e-3, compression="compso(bound=4e-3)")
        loss.backward()
        kfac.step()
        optimizer.step()

    Make it on every rank, with the same arguments, before the first forward pass. A DistributedDataParallel, or
    a cortado.Reducer (its wait() before this step()), averages the gradients; without them step() does, those of
    preconditioned layers only to the ranks that need them. With DDP give it the DDP module: if it gets the module
    inside, it averages once more.

    The model is on the CPU or on one CUDA device; there K-FAC computes on the device (``libcortado_cuda_kfac.so`` is
    needed, built with nvcc). Move it before.

    Options named as in kfac-pytorch; those marked * may be a function of the step number.

    factor_update_steps*, inv_update_steps*: steps between updates of the factors, and of their inverses.
    damping*, factor_decay*: of the factors. kl_clip*: bound of the change in KL divergence; None or 0 is off.
    lr*: the learning rate, for kl_clip only; or the optimizer, whose first group's is taken.
    compute_method: "eigen" or "inverse" (by Cholesky decomposition).
    grad_worker_fraction: share of the ranks that precondition a layer: 1 is COMM-OPT; 1 / world size, or 0, MEM-OPT.
    strategy: "comm-opt", "hybrid-opt" (needs grad_worker_fraction), "mem-opt" or "dp-kfac", instead of a fraction.
        Without either COMM-OPT, but MEM-OPT with ``compression``.
    colocate_factors: one rank inverts both factors of a layer. assignment_strategy: "compute" or "memory".
    skip_layers: patterns (re.search) of names or class names of layers to leave alone.
    grad_scaler: what has scaled the loss (anything with get_scale(), or a function that gives the scale); call its
        unscale_(optimizer) before step(), and, where step() averages the gradients, synchronize() before that.
    loglevel: where to list at the start what is preconditioned: as a record of this level of the logger "cortado.kfac",
        instead of on stderr.
    accumulation_steps, allreduce_bucket_cap_mb, compute_eigenvalue_outer_product, symmetry_aware, factor_dtype,
        inv_dtype, update_factors_in_hook: have no effect, and a warning says why.

    pi_correction: splits the damping between the factors of a layer by their mean eigenvalues.
    compression*: codec of preconditioned gradients, a string or dict ("compso(bound=4e-3)", "quant(bits=8)").
    factor_compression*: codec of factors, and of eigenvectors or inverses; eigenvalues travel as they are.
        "auto", for either: of each kind of message the candidate is taken, and the number of layers that share a table,
        that the performance model predicts to be fastest, if it is by the clock as well; or none. report() says which
        and why.
    candidates, cluster: for "auto", without effect otherwise. Codecs, or one: a string or dict, or a function of the
        step that gives one codec with other options, the same on all ranks: what is decided goes on with it. The path
        or content of a file of cortado.calibrate, by default the links and the candidates are measured at the start,
        for about ten seconds.
    error_feedback: the owner of a layer adds what encoding it has lost.
    aggregate: layers that share a table of codes in ``compso``; 0: all of a rank.
    reduce_gradients: whether step() averages the gradients; None: unless DDP or a cortado.Reducer does.
    threads: that invert factors, each its own; the results do not depend on it.
    process_group, random_seed, timeout_s: of the exchange. check_collectives: as for cortado.attach; gradients that are
        not preconditioned are averaged without checks where step() averages them, and "auto" counts none.
    verbose: rank 0 prints what is preconditioned, and what not.
    """

    def __init__(
        self,
        model,
        *,
        factor_update_steps=1,
        inv_update_steps=1,
        damping=1e-3,
        factor_decay=0.95,
        kl_clip=1e-3,
        lr=0.1,
        compute_method="eigen",
        grad_worker_fraction=None,
        strategy=None,
        colocate_factors=True,
        assignment_strategy="compute",
        skip_layers=(),
        grad_scaler=None,
        accumulation_steps=None,
        allreduce_bucket_cap_mb=None,
        compute_eigenvalue_outer_product=None,
        symmetry_aware=None,
        factor_dtype=None,
        inv_dtype=None,
        update_factors_in_hook=None,
        loglevel=None,
        pi_correction=False,
        compression="none",
        factor_compression="none",
        error_feedback=False,
        aggregate=0,
        candidates=("compso(bound=4e-3)", "compso(bound=4e-3, coder=none)"),
        cluster=None,
        reduce_gradients=None,
        process_group=None,
        random_seed=0,
        timeout_s=1800.0,
        check_collectives=False,
        threads=1,
        verbose=True,
    ):
        model = without_compile(model)
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._ddp = model if is_ddp else None
        self._model = model.module if is_ddp else model
        self._process_group = model.process_group if is_ddp and process_group is None else process_group
        self._group = self._make_group(self._process_group)
        self._schedules = {
            "factor_update_steps": factor_update_steps,
            "inv_update_steps": inv_update_steps,
            "damping": damping,
            "factor_decay": factor_decay,
            "kl_clip": kl_clip,
            "lr": _schedule_of(lr),
        }
        self._compression = compression
        self._factor_compression = factor_compression
        with self._on_all_ranks("could not make a KFAC"):
            check_types(
                bool,
                pi_correction=pi_correction,
                colocate_factors=colocate_factors,
                error_feedback=error_feedback,
            )
            check_types(int, aggregate=aggregate, random_seed=random_seed, threads=threads)
            if not 1 <= threads <= 1024:
                raise SpecError(f"threads must be from 1 to 1024, got {threads}")
            check_types(float, timeout_s=timeout_s)
            for name, value in self._schedules.items():
                if not callable(value):
                    hyperparameter(name, value)
            self._get_scale = scale_function(grad_scaler)
            self._skips_steps = skips_steps(grad_scaler)
            self._grad_scaler = grad_scaler
            ineffective = without_effect(
                {
                    "accumulation_steps": accumulation_steps,
                    "allreduce_bucket_cap_mb": allreduce_bucket_cap_mb,
                    "compute_eigenvalue_outer_product": compute_eigenvalue_outer_product,
                    "symmetry_aware": symmetry_aware,
                    "factor_dtype": factor_dtype,
                    "inv_dtype": inv_dtype,
                    "update_factors_in_hook": update_factors_in_hook,
                }
            )
            self._spec = _compression_at(compression, 0)
            self._factor_spec = _compression_at(factor_compression, 0)
            self._take_layers(skip_layers or ())
            compresses = callable(compression) or self._spec != "none"
            name, workers, self._why = choose_strategy(strategy, grad_worker_fraction, self._world_size, compresses)
            options = {
                "strategy": name,
                "workers": workers,
                "is_eigen": one_of("compute_method", compute_method, ("eigen", "inverse")) == "eigen",
                "pi_correction": pi_correction,
                "colocate_factors": colocate_factors,
                "balance_memory": one_of("assignment_strategy", assignment_strategy, ("compute", "memory")) == "memory",
                "compression": self._spec,
                "use_error_feedback": error_feedback,
                "aggregate": aggregate,
                "random_seed": random_seed,
                "factor_compression": self._factor_spec,
                "schedule": f"factors {_interval(factor_update_steps)}, inverses {_interval(inv_update_steps)}",
                "timeout_s": timeout_s,
                "checks_collectives": check_collectives,
                "threads": threads,
            }
            if self._place.library is not None:
                options.update(device_library=self._place.library, device=self._device.index or 0)
            self._candidates = ()  # of "auto", each at any step
            is_auto = "auto" in (self._spec, self._factor_spec) and self._world_size > 1
            if is_auto:
                options.update(self._options_of_auto(candidates, cluster))
        agree_on_flag(self._group, "check_collectives", check_collectives)
        agree_on_flag(self._group, 'whether "auto" chooses a codec', is_auto)
        if is_auto:
            self._agree_on_cluster(options, is_told=verbose and loglevel is None)
        self._options = options
        self._reduce_gradients = False if is_ddp and reduce_gradients is None else reduce_gradients
        self._averagers, self._nobody_averages = [], None  # not known yet
        if self._reduce_gradients is None and holder_of(self._model.parameters()) is not None:
            gc.collect()  # a DDP that nobody has any more averages nothing, on all ranks from now on
        if self._group is not None:
            self._group.connect_both_ways()
        with damage_ends_all(self._group):
            self._core = _core.Kfac([layer.to_core() for layer in self._layers], options, *self._core_group())
        if self._group is not None:
            self._group.set_timeout(timeout_s)
        are_read_later = self._place.library is not None
        refuse = weakref.WeakMethod(self._refuse_change_in_place)
        self._batches = Batches(
            self._core, self._device, are_read_later=are_read_later, on_change=lambda *held: refuse()(*held)
        )
        self._begin_first_step()
        self._install_hooks()
        if self._rank == 0:
            if ineffective:
                warn(ineffective)
            if loglevel is not None:
                logging.getLogger("cortado.kfac").log(loglevel, self.describe())
            elif verbose:
                print(self.describe(), file=sys.stderr, flush=True)
        self._warn_if_pointless()

    # ---- set-up

    def _take_layers(self, skip_layers):
        """The layers that are preconditioned, and where that is done."""
        if not isinstance(self._model, torch.nn.Module):
            raise SpecError(f"KFAC needs a torch.nn.Module, got {type(self._model).__name__}")
        if fsdp_hint(self._model):
            raise SpecError(f"{type(self._model).__name__}{fsdp_hint(self._model)}")
        self._layers, self.skipped = find_layers(self._model, skip_layers)
        if not self._layers:
            raise SpecError(f"no layer of the model can be preconditioned: {_list_skipped(self.skipped)}")
        if _preconditioned_by_another(self._layers):
            raise SpecError("another KFAC preconditions layers of this model: call its detach() first")
        self._device = device_of_layers(self._layers)
        self._place = place_of_kfac(self._device)
        if self._device.type == "cuda" and self._place.library is None:
            raise SpecError(f"cortado.KFAC can't work on {self._device}: {self._place.reason}")

    def _options_of_auto(self, candidates, cluster):
        is_one = callable(candidates) or isinstance(candidates, (str, dict))
        self._candidates = (candidates,) if is_one else tuple(candidates)
        first = self._candidates_at(0)
        for candidate in first:
            _core.canonical_spec(candidate)  # calibrating, one rank would fail alone
        return {"candidates": first, "cluster": _cluster_text(cluster)}

    def _begin_first_step(self):
        self._loss_scale = None  # of this forward and backward pass
        self._first_layer = None  # with whose call the pass has begun
        self._wanted = [self._core.wants_batches(i) for i in range(len(self._layers))]
        self._is_synchronized = False
        self._is_finite = True
        self._watches = []
        self._skipped_steps = 0  # because of Inf or NaN, before the C++ side had a part in them
        self._step_ns = 0
        self._open_calls = [0] * len(self._layers)  # forward passes whose backward pass has not come
        self._opened_in = [_NO_BACKWARD_PASS] * len(self._layers)
        self._further_calls = [0] * len(self._layers)
        self._has_warned = False
        self._has_forward_pass = False  # of a layer in training, since the last step
        self._misses_forward_pass = False  # and was told so

    def _agree_on_cluster(self, options, is_told):
        """Of "auto": what was given, the same on all ranks, or what is measured now."""
        agree_on_flag(self._group, "whether a cluster is given", options["cluster"] is not None)
        agree_on_text(self._group, 'candidates of "auto"', "; ".join(options["candidates"]))
        if options["cluster"] is not None:
            return
        if is_told and self._rank == 0:
            text = f"cortado: K-FAC measures links and codecs for about {_CALIBRATION_S:g} s (not with cluster=)"
            print(text, file=sys.stderr, flush=True)
        measured = calibrate(self._process_group, codecs=options["candidates"], budget_s=_CALIBRATION_S)
        options["cluster"] = measured.to_json()

    def _install_hooks(self):
        self._hooks = [
            layer.module.register_forward_hook(self._forward_hook(i), with_kwargs=True)
            for i, layer in enumerate(self._layers)
        ]
        weakref.finalize(self, _remove, self._hooks)
        weakref.finalize(self, _remove, self._watches)
        for layer in self._layers:
            _holders[layer.module] = weakref.ref(self)

    @staticmethod
    def _make_group(process_group):
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            return None
        return TorchGroup(process_group)

    def _on_all_ranks(self, failed_to, timeout_s=SETUP_TIMEOUT_S):
        return contextlib.nullcontext() if self._group is None else on_all_ranks(self._group, failed_to, timeout_s)

    @property
    def _rank(self):
        return self._group.rank if self._group is not None else 0

    @property
    def _world_size(self):
        return self._group.world_size if self._group is not None else 1

    def _core_group(self):
        group = self._group
        return (None, 0, 1, "") if group is None else (group, group.rank, group.world_size, group.name)

    def _warn_if_pointless(self):
        strategy = self._options["strategy"]
        if self._rank != 0 or self._has_warned:
            return
        if self._options["use_error_feedback"] and self._spec == "none" and not callable(self._compression):
            self._has_warned = True
            warn("error_feedback has no effect without compression=")
        if strategy == "COMM-OPT" and self._spec != "none":
            self._has_warned = True
            warn(
                f"COMM-OPT sends no preconditioned gradients, so compression={self._spec} has no effect; what travels "
                "are factors and eigenvectors: factor_compression="
            )
        elif strategy == "DP-KFAC" and self._factor_spec != "none":
            self._has_warned = True
            warn(
                f"DP-KFAC sends no factors and no inverses, so factor_compression={self._factor_spec} has no effect; "
                "what travels are preconditioned gradients: compression="
            )

    def describe(self):
        """What is preconditioned, how it is exchanged, and what is left alone and why."""
        options = self._options
        feedback = " with error feedback" if options["use_error_feedback"] else ""
        place = f"; computed on {self._device}" if self._place.library is not None else ""
        parameters = sum(p.numel() for layer in self._layers for p in layer.parameters)
        travel = f"gradients as {self._spec}{feedback}"
        if options["strategy"] == "COMM-OPT":
            travel = f"factors and inverses as {self._factor_spec}"
        elif options["strategy"] != "DP-KFAC":
            travel += f", factors as {self._factor_spec}"
        lines = [
            f"cortado: K-FAC, {options['strategy']} ({self._why}) on {counted(self._world_size, 'rank')}, "
            f"{'eigenvectors' if options['is_eigen'] else 'inverses'}; {travel}{place}",
            *([f"  gradients are averaged by {self._who_averages()}"] if self._world_size > 1 else []),
            f"  preconditions {counted(len(self._layers), 'layer')}, {parameters} parameters: "
            + ", ".join(str(layer) for layer in self._layers),
        ]
        if self.skipped:
            lines.append(f"  leaves alone {_list_skipped(self.skipped)}")
        return "\n".join(lines)

    def _who_averages(self):
        if self._reduce_gradients:
            return "step()"
        if self._ddp is not None:
            return "DistributedDataParallel"
        if holder_of(self._model.parameters()) is not None:
            return "cortado.attach or cortado.Reducer"
        if self._reduce_gradients is False:
            return "the caller, before step() (reduce_gradients=False)"
        return (
            "step(), or by a cortado.Reducer if one is made; if DDP averages them too, give KFAC the DDP module, or "
            "reduce_gradients=False"
        )

    # ---- hyper-parameters

    @property
    def steps(self):
        """Steps done."""
        return self._core.steps

    def _value(self, name):
        value = self._schedules[name]
        return hyperparameter(name, value(self.steps) if callable(value) else value)

    def _is_due(self, name):
        return self.steps % self._value(name) == 0

    def _set_value(self, value, name):
        value = _schedule_of(value) if name == "lr" else value
        if not callable(value):
            hyperparameter(name, value)
        self._schedules[name] = value

    # Of the next step, as kfac-pytorch names them. What is assigned, on all ranks, counts from then on.
    factor_update_steps, inv_update_steps, damping, factor_decay, kl_clip, lr = (
        property(lambda self, name=name: self._value(name), lambda self, value, name=name: self._set_value(value, name))
        for name in HYPERPARAMETERS
    )

    # ---- hooks

    def _forward_hook(self, index):
        kfac = weakref.ref(self)  # the model does not keep it, nor the hook the model

        @torch.compiler.disable
        def on_output_gradient(gradient):
            self = kfac()
            if self is None:
                return
            layer = self._layers[index]
            self._open_calls[index] = max(0, self._open_calls[index] - 1)
            with self._errors_end_all(MismatchError):
                values, count, height, width = layer.output_gradients(gradient)
            self._check_device(values, f"the output gradients of {layer.name}")
            if values.numel():
                code, shape = DTYPE_CODES[values.dtype], (count, height, width)
                self._batches.add(index, False, values, code, shape, self._scale_of_loss())

        @torch.compiler.disable
        def on_forward(module, inputs, named_inputs, output):
            self = kfac()
            if self is None:
                return
            layer = self._layers[index]
            if module is not layer.module:  # but a copy of it
                return
            if not (module.training and torch.is_grad_enabled() and self._wanted[index]):
                return
            self._has_forward_pass = True
            backward_pass = _current_backward_pass()
            if self._open_calls[index] and backward_pass not in (_NO_BACKWARD_PASS, self._opened_in[index]):
                return  # torch.utils.checkpoint computes it again: counted the first time, where its gradient arrives
            with self._errors_end_all():
                is_due = output.requires_grad and self._is_due("factor_update_steps")
            if not is_due:
                return
            given = inputs[0] if inputs else named_inputs["input"]
            with self._errors_end_all(MismatchError):
                values, count, height, width = layer.activations(given)
            self._check_device(values, f"the activations of {layer.name}")
            if values.numel():
                if self._batches.are_read_later:
                    self._note_scale(index)
                code, shape = DTYPE_CODES[values.dtype], (count, height, width)
                # Where the layer has computed with a copy in another dtype, autograd keeps that one.
                is_kept = given.grad_fn is not None and given.dtype == output.dtype
                may_change = not is_kept and values.data_ptr() == given.data_ptr()
                self._batches.add(index, True, values, code, shape, may_change=may_change)
            self._further_calls[index] += self._open_calls[index] > 0
            self._open_calls[index] += 1
            self._opened_in[index] = backward_pass
            _hook_gradient(output, on_output_gradient)

        return _Hook(on_forward)

    def _note_scale(self, index):
        """A pass has begun, perhaps after one that no step() came for: with another scale."""
        if self._first_layer in (None, index) or not any(self._open_calls):
            self._first_layer = index
            self._loss_scale = None
        self._scale_of_loss()

    def _scale_of_loss(self):
        """A GradScaler's lies on the device, so it is read as a forward pass begins: little is under way."""
        if self._get_scale is None:
            return 1.0
        if self._loss_scale is None or not self._batches.are_read_later:
            with self._errors_end_all():
                self._loss_scale = float(self._get_scale())
                if not 0 < self._loss_scale < math.inf:
                    raise SpecError(f"grad_scaler must give a scale above 0 and below Inf, got {self._loss_scale}")
        return self._loss_scale

    def _check_device(self, tensor, what):
        if tensor.device != self._device:  # its address would mean nothing there
            text = f"this cortado.KFAC was made for layers on {self._device}; {what} are on {tensor.device}"
            self._refuse(SpecError(text))

    def _refuse_change_in_place(self, index, is_activations):
        what = f"the {'activations' if is_activations else 'output gradients'} of layer {self._layers[index].name}"
        self._refuse(SpecError(f"{what} were changed in place before kfac.step(), which reads them: change a copy"))

    def _refuse(self, error):
        """Raises an error that other ranks may not have, and that ends their wait for this one."""
        if self._group is not None:
            self._group.announce(str(error) if isinstance(error, CortadoError) else f"{type(error).__name__}: {error}")
        raise error

    @contextlib.contextmanager
    def _errors_end_all(self, kinds=Exception):
        """An error in what a rank does for itself, before it meets the others, ends their wait."""
        try:
            yield
        except kinds as error:
            self._refuse(error)

    def reset_batch(self):
        """Forgets the activations and output gradients since the last step, and that synchronize() was called: for a
        step() that is left out."""
        self._open_calls = [0] * len(self._layers)
        self._has_forward_pass = False
        self._forget_batches()
        self._forget_average()
        _remove(self._watches)

    def _forget_average(self):
        self._is_synchronized, self._is_finite = False, True

    def _watch_gradients(self, parameters):
        """Gradients that change once they were averaged are not averaged any more: no step() came."""
        _remove(self._watches)
        kfac = weakref.ref(self)  # the model does not keep it

        def forget_average(_parameter):
            alive = kfac()
            if alive is not None:
                alive._forget_average()

        self._watches.extend(p.register_post_accumulate_grad_hook(forget_average) for p in parameters)

    def _forget_batches(self):
        self._core.reset_batch()
        self._batches.release()
        self._loss_scale = self._first_layer = None

    # ---- the step

    def _reduces(self):
        """Whether nobody else averages the gradients. Decided once, and anew when a Reducer was closed, as it is at the
        same point on all ranks."""
        if self._world_size == 1 or self._reduce_gradients is not None:
            return self._world_size > 1 and self._reduce_gradients
        closed = [averager for averager in self._averagers if not is_open(averager)]
        if closed:
            if not all(isinstance(averager, Reducer) for averager in closed):
                self._refuse(CortadoError("the DDP module that averaged the gradients is gone: make a new KFAC"))
            self._averagers, self._nobody_averages = [], None
        if self._nobody_averages is None:
            self._nobody_averages = self._find_averager()
        return self._nobody_averages

    def _find_averager(self):
        """To _averagers; True if there are none."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        left = without_holder(parameters)
        if left and len(left) < len(parameters):
            text = (
                f"cortado.attach or a cortado.Reducer averages the gradients of {len(parameters) - len(left)} of "
                f"the {len(parameters)} parameters of the model that KFAC was given, and nobody the others: "
                "let it have all of them, or say reduce_gradients=False and average the others yourself"
            )
            self._refuse(SpecError(text))
        self._averagers = [] if left else holders_of(parameters)
        return bool(left)

    def _has_equal_gradients(self):
        """Whether DDP or Reducers are known to have averaged what is preconditioned over all of these ranks."""
        if self._world_size == 1:
            return True
        holders = holders_of(self._model.parameters())
        hooks = [] if self._ddp is None else getattr(self._ddp, "_comm_hooks", [(None, None)])
        if not holders:  # ddp_hook's is known to its DDP only
            holders = [state for _, state in hooks if isinstance(state, Attachment)]
        if holders:
            spanning = [holder for holder in holders if self._is_within(holder._group._group)]
            own = (p for layer in self._trained_layers() for p in layer.parameters)
            return all(any(p in holder._index for holder in spanning) for p in own)
        if self._ddp is None:
            return False
        # A hook that is not ours may leave ranks with their own.
        return not self._ddp.parameters_to_ignore and not hooks and self._is_within(self._ddp.process_group)

    def _is_within(self, group):
        """Whether all ranks of K-FAC are in this process group."""
        ranks = dist.get_process_group_ranks(self._process_group)
        return set(ranks) <= set(dist.get_process_group_ranks(group))

    def _trained_layers(self):
        return [layer for layer in self._layers if layer.is_trained]

    def _are_gradients_finite(self):
        """Those of preconditioned layers, on this rank."""
        finite = []
        for layer in self._trained_layers():
            for parameter in layer.parameters:
                if parameter.grad is not None:
                    self._check_device(parameter.grad, f"gradients of {layer.name}")
                    finite.append(torch.isfinite(parameter.grad).all())
        return not finite or bool(torch.stack(finite).all())

    def synchronize(self):
        """Averages gradients over ranks where nobody else does; step() calls it unless that was done.

        With a GradScaler call it before ``unscale_``, so that all ranks see an overflow on any of them. Clip behind
        step(): until then the mean of a preconditioned layer's gradients is only on ranks that precondition it.
        """
        self._average()
        if self._is_synchronized:
            self._watch_gradients(p for p in self._model.parameters() if p.requires_grad)

    def _check_can_average(self, parameters):
        for parameter in parameters:
            self._check_device(parameter, "parameters")
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                text = f'step() averages dense gradients, that of "{name}" is {parameter.grad.layout}: sparse=False'
                self._refuse(SpecError(text))
            if parameter.is_complex():
                text = f'step() averages real gradients, "{name}" is {parameter.dtype}: average by yourself, '
                self._refuse(SpecError(text + "and say reduce_gradients=False"))

    def _average(self):
        if self._is_synchronized or not self._reduces():
            return
        own = {parameter for layer in self._trained_layers() for parameter in layer.parameters}
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        others = [p for p in parameters if p not in own]
        self._check_can_average(parameters)
        # One message: gradients that are not preconditioned, which parameters have one, who has an Inf or NaN.
        is_non_finite = not self._are_gradients_finite()
        wide = torch.float64 if any(p.dtype == torch.float64 for p in others) else torch.float32
        flags = torch.tensor([*(float(p.grad is not None) for p in parameters), float(is_non_finite)], dtype=wide)
        dense = [_dense_gradient(p, wide).reshape(-1) for p in others]
        flat = torch.cat([torch.cat(dense).cpu(), flags]) if dense else flags
        try:
            self._group.all_reduce(flat, self._options["timeout_s"])
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(f"step {self.steps}: averaging gradients: {error}") from error
        self._is_synchronized = True
        dense, flags = flat[: -len(flags)] / self._world_size, flat[-len(flags) :].tolist()
        for parameter, ranks in zip(parameters, flags, strict=False):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        means = dense.to(self._device)  # in one copy
        for parameter, mean in zip(others, means.split([p.numel() for p in others]), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view(parameter.shape))
        self._is_finite = not flags[-1] and bool(torch.isfinite(dense).all())
        if self._is_finite:
            self._with_gradients(lambda gradients: self._core.reduce_gradients(gradients, self._stream()))
        else:  # as a sum over ranks would be, so that unscale_ sees it on all of them
            for parameter in own:
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))

    @torch.no_grad()
    def step(self):
        """Preconditions the gradients; False, and no residual has changed, if some rank had Inf or NaN in them.

        Then gradients stay as they are where something else averages them. Where step() does they are zero afterwards:
        an optimizer that steps all the same does on all ranks what it does with gradients of zero.

        Factors, inverses and ``steps`` stay too, and the batches are forgotten, where gradients are averaged by step(),
        by the DDP module that KFAC was given (without a communication hook of others) or by a cortado.Reducer, and on
        one rank. Not so with averaging that is not known here (reduce_gradients=False), where ranks agree on it only
        with the preconditioned gradients, and where these overflow though the gradients did not.
        """
        start_ns = time.perf_counter_ns()
        self._refuse_before_wait()
        if self._skips_steps and self._reduces() and not self._is_synchronized:
            text = (
                "the ranks' gradients were unscaled before they were averaged, so a GradScaler would see an overflow "
                "on some ranks only, and leave out their optimizer step alone: call kfac.synchronize() after the "
                "backward pass, before scaler.unscale_(optimizer). If DDP has averaged them, give KFAC the DDP module"
            )
            self._refuse(SpecError(text))
        if is_scaled_still(self._grad_scaler):
            text = (
                "the gradients still carry the scale of the loss, which damping and kl_clip would take for theirs: "
                "call scaler.unscale_(optimizer) before kfac.step()"
            )
            self._refuse(SpecError(text))
        self._average()
        is_finite = self._is_finite
        self._forget_average()
        _remove(self._watches)
        if not self._reduces() and self._has_equal_gradients():
            is_finite = self._are_gradients_finite()  # the same on all ranks
        if is_finite:
            self._batches.check()
            is_finite = self._precondition()
            self._batches.forget()
            self._loss_scale = self._first_layer = None
        else:
            self._forget_batches()
            self._skipped_steps += 1
        if not is_finite and self._reduces():
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self._open_calls = [0] * len(self._layers)
        self._has_forward_pass = False
        self._step_ns += time.perf_counter_ns() - start_ns
        return is_finite

    def _refuse_before_wait(self):
        for holder in holders_of(self._model.parameters()):
            if isinstance(holder, Reducer) and holder._owes_wait:
                text = "kfac.step() comes after reducer.wait(), which averages the gradients that it preconditions"
                self._refuse(CortadoError(text))

    def _warn_of_no_forward_pass(self):
        """In a step that updates factors, whose note in report() few would read."""
        if self._has_forward_pass or self._misses_forward_pass or self._rank != 0 or not any(self._wanted):
            return
        self._misses_forward_pass = True
        warn(
            f"step {self.steps} updates the factors, but this rank had no forward pass in training mode since the step "
            "before. A KFAC is made before the forward pass"
        )

    def _set_codecs(self):
        spec = _compression_at(self._compression, self.steps)
        if spec != self._spec:
            self._core.set_compression(spec)
            self._spec = spec
            self._warn_if_pointless()
        if callable(self._factor_compression):  # on all ranks then, which compare what it gave them
            self._factor_spec = _compression_at(self._factor_compression, self.steps)
            self._core.set_factor_compression(self._factor_spec)
            self._warn_if_pointless()
        if any(callable(candidate) for candidate in self._candidates):
            self._core.set_candidates(self._candidates_at(self.steps))

    def _candidates_at(self, step):
        return [_compression_at(candidate, step) for candidate in self._candidates]

    def _precondition(self):
        with self._errors_end_all():  # a function may give one rank what it gives no other
            self._set_codecs()
            names = ("factor_decay", "damping", "kl_clip", "lr")
            values = [self._value(name) for name in names]
            due = [self._is_due("factor_update_steps"), self._is_due("inv_update_steps")]
            if due[0]:
                self._warn_of_no_forward_pass()
        with self._errors_end_all(SpecError):  # such as damping=0
            return self._with_gradients(lambda gradients: self._core.step(*values, *due, gradients, self._stream()))

    def _stream(self):
        return address_of_current_stream(self._device)

    def _with_gradients(self, act):
        """Calls act with the gradients as the C++ side takes them; what it writes arrives in ``.grad``."""
        copies = []
        with self._errors_end_all():
            gradients = [self._gradient_of(layer, copies) for layer in self._layers]
        result = act(gradients)
        for gradient, dense in copies:
            gradient.copy_(dense)
        return result

    def _gradient_of(self, layer, copies):
        """(address of the weight's, of the bias's, dtype); copies gets what is not in ``.grad``: (gradient, copy)"""
        layer.check_parameters()
        if not layer.is_trained or layer.module.weight.grad is None:
            return 0, 0, 0
        dense = []
        for parameter in layer.parameters:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
                parameter.grad = gradient if parameter.requires_grad else None  # a frozen bias stays as it is
            self._check_device(gradient, f"gradients of {layer.name}")
            dense.append(gradient.detach().contiguous())
            if parameter.grad is None or dense[-1].data_ptr() != gradient.data_ptr():
                copies.append((gradient, dense[-1]))
        addresses = [each.data_ptr() for each in dense]
        return addresses[0], addresses[1] if layer.has_bias else 0, layer.dtype_code(dense)

    # ---- what users call

    def report(self):
        """Bytes, ratio with error, time by stage, and what was not done as asked."""
        values = self._core.report()
        values["non_finite_steps"] += self._skipped_steps
        values.update(
            strategy=self._options["strategy"],
            world_size=self._world_size,
            compression=self._spec,
            factor_compression=self._factor_spec,
            skipped=dict(self.skipped),
            step_ns=self._step_ns,
            runs_on="cpu" if self._place.library is None else "device",
        )
        reason = "called again before its backward pass: each call counts as a batch"
        values["fallbacks"] += [
            {"layer": layer.name, "reason": reason, "count": calls}
            for layer, calls in zip(self._layers, self._further_calls, strict=True)
            if calls
        ]
        return KfacReport(values)

    def memory_usage(self):
        """Bytes this rank holds, by purpose, and their total; held: batches that a device may not have read yet."""
        values = self._core.memory()
        held = self._batches.held_bytes
        return {**values, "held": held, "total": values["total"] + held}

    def state_dict(self, include_factors=True, *, include_inverses=None):
        """What this rank holds, keyed by layer; every rank saves its own.

        Without inverses it is about a third as large, and the first step after loading computes them from the factors.
        Without factors (and then, unless asked for, without inverses) it holds the step and residuals only: loading it
        lets factors begin anew.
        """
        state = self._core.save_state(include_factors if include_inverses is None else include_inverses)
        left_out = () if include_factors else ("a_factor", "g_factor")
        for name, layer in state["layers"].items():
            tensors = {key: torch.from_numpy(values) for key, values in layer.items() if key not in left_out}
            state["layers"][name] = tensors
        return state

    def load_state_dict(self, state, compute_inverses=True):
        """Continues where state_dict() was taken; call it on every rank.

        compute_inverses=False has no effect, as inverses that the state lacks are computed in the next step, once.

        state: this rank's own, or the list of the states of all ranks, which any world size and strategy can load. What
        is in none of them begins anew, and a warning says of how many layers.
        """
        if not compute_inverses and self._rank == 0:
            warn("compute_inverses=False has no effect because the next step computes what the state lacks, once")
        states = state if isinstance(state, (list, tuple)) else [state]
        with self._on_all_ranks("could not load its state", self._options["timeout_s"]):
            arrays = [self._arrays_of(one) for one in states]
        with damage_ends_all(self._group):
            warning = self._core.load_state(arrays)
        if warning:
            print(f"cortado: {warning}", file=sys.stderr, flush=True)

    def _arrays_of(self, state):
        """The state with numpy arrays in place of tensors."""
        numbers = dict.fromkeys(("world_size", "rank", "step"), int)
        check_state(state, _STATE_FORMAT, strategy=str, **numbers, layers=dict)
        unknown = sorted(set(state["layers"]) - {layer.name for layer in self._layers})
        if unknown:
            raise MismatchError(f"the state has layers that are not preconditioned here: {unknown[:3]}")
        layers = {}
        for name, layer in state["layers"].items():
            check_is(f'layers["{name}"]', layer, dict)
            layers[name] = {key: array_of(f'layers["{name}"]["{key}"]', values) for key, values in layer.items()}
        return {**state, "layers": layers}

    def detach(self):
        """Removes the hooks from the model, which another KFAC may precondition then."""
        _remove(self._hooks)
        _remove(self._watches)
        for layer in self._layers:
            if _holders.get(layer.module, lambda: None)() is self:
                del _holders[layer.module]


def has_kfac(module):
    """Whether the hooks of a KFAC are on a part of it."""
    return any(_holders.get(part, lambda: None)() is not None for part in module.modules())


def _remove(hooks):
    while hooks:
        hooks.pop().remove()


def _preconditioned_by_another(layers):
    """A KFAC that nobody has any more may still wait to be collected."""
    for collect in (lambda: None, gc.collect):
        collect()
        if all(_holders.get(layer.module, lambda: None)() is None for layer in layers):
            return False
    return True


class _Hook:
    """Of one KFAC: copies and files of the model have one that does nothing."""

    def __init__(self, act=None):
        self._act = act

    def __call__(self, *arguments):
        return self._act(*arguments) if self._act is not None else None

    def __reduce__(self):
        return _Hook, ()


def _current_backward_pass():
    """The number of the backward pass in which this is called; it has no public name."""
    return getattr(torch._C, "_current_graph_task_id", lambda: _NO_BACKWARD_PASS)()


def _hook_gradient(output, act):
    """Of a view of all of its base (a linear layer's output of three dimensions) the hook is on the base: that on the
    view goes with its node where what comes next (an activation) works in place."""
    base, shape = output._base, output.shape
    is_whole = base is not None and base.grad_fn is not None and base.numel() == output.numel()
    if is_whole and base.is_contiguous() and output.is_contiguous():
        base.register_hook(lambda gradient: act(gradient.reshape(shape)))
    else:
        output.register_hook(act)


def _schedule_of(lr):
    return (lambda step: lr.param_groups[0]["lr"]) if hasattr(lr, "param_groups") else lr


def _compression_at(compression, step):
    if not callable(compression):
        return spec_from(compression)
    spec = spec_from(compression(step))
    if spec == "auto":
        raise SpecError(
            'a function of the step gives codecs; for "auto" say compression="auto", and candidates=[function]'
        )
    return spec


def _interval(update_steps):
    return "when a function says" if callable(update_steps) else f"every {update_steps} steps"


def _cluster_text(cluster):
    """The cluster file that a path, a dict or a Cluster stands for; None for None."""
    if cluster is None:
        return None
    if not isinstance(cluster, Cluster):
        cluster = Cluster(cluster) if isinstance(cluster, dict) else Cluster.load(cluster)
    return cluster.to_json()


def _list_skipped(skipped):
    by_reason = {}
    for name, reason in skipped.items():
        by_reason.setdefault(reason, []).append(name or "(the model itself)")
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()) or "it has none"


def _dense_gradient(parameter, dtype):
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().to(dtype)
