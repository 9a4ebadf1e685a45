# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Cortado with Hugging Face Accelerate.

    model, optimizer = accelerator.prepare(model, optimizer)
    cortado.accelerate.attach(accelerator, model)  # before the first backward pass and before load_state()

From then on accelerator.save_state() and load_state() keep what training needs to resume, a file cortado_RANK.pt for
each rank beside theirs.
"""

import warnings
import weakref

from .frameworks import attach_to, load_from_folder, save_in_folder
from .parameters import without_compile


def attach(accelerator, model, plan="auto", **options):
    """cortado.attach() for what ``accelerator.prepare()`` made of a model; returns the state. Call it on every process.

    model, plan and options: as for cortado.attach(). grad_scaler is the accelerator's, if not said otherwise, and where
    the processes are connected by NCCL alone the exchange gets a process group of Gloo. With a single process there is
    nothing to exchange, and the state is None.
    """
    state = attach_to(model, plan, options, accelerator.scaler)
    if state is None:
        return None
    find_ddp = weakref.ref(without_compile(model))

    def prefix_of(models):
        """Of this model's files, numbered as the accelerator numbers its own; None where it has let go of the model."""
        ddp = find_ddp()
        if ddp is None:
            return None
        # It lists models as they were before it wrapped them.
        places = [i for i, known in enumerate(models) if without_compile(known) in (ddp, ddp.module)]
        if not places:
            what = "the accelerator no longer knows a model that was attached"
            warnings.warn(f"cortado: {what}: its state is not in the checkpoint", stacklevel=3)
            return None
        return f"cortado_{places[0]}" if places[0] > 0 else "cortado"

    def save(models, weights, folder):
        if prefix := prefix_of(models):
            save_in_folder(state, folder, prefix)

    def load(models, folder):
        if prefix := prefix_of(models):
            load_from_folder(state, folder, prefix)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return state
