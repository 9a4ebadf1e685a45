# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Cortado with the Trainer of Hugging Face Transformers.

    trainer = Trainer(model, arguments, ...)
    cortado.transformers.attach(trainer)
    trainer.train()

Each checkpoint then has a file cortado_RANK.pt for each rank, and trainer.train(resume_from_checkpoint=True) reads it.
"""

import weakref
from pathlib import Path

from transformers import TrainerCallback

from .frameworks import attach_to, load_from_folder, save_in_folder
from .parameters import without_compile


def attach(trainer, plan="auto", *, resume_from_checkpoint=None, **options):
    """cortado.attach() for the model of ``trainer``, as soon as train() has wrapped it. Call it on every process.

    resume_from_checkpoint: the folder that train() is given, where it is not that of the same step in the output
        folder.
    plan and options: as for cortado.attach(). grad_scaler is the trainer's, if not said otherwise, and where the
        processes are connected by NCCL alone the exchange gets a process group of Gloo.

    Returns the callback, whose ``state`` is that of cortado.attach() once training begins; with a single process there
    is nothing to exchange, and it stays None.
    """
    callback = GradientCompression(trainer, plan, resume_from_checkpoint, options)
    trainer.add_callback(callback)
    return callback


class GradientCompression(TrainerCallback):
    """Made by attach()."""

    def __init__(self, trainer, plan, resume_from_checkpoint, options):
        self.state = None
        self._ddp = None
        self._trainer = weakref.ref(trainer)
        self._plan = plan
        self._resumes_from = resume_from_checkpoint
        self._options = options

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self._trainer()
        ddp = without_compile(trainer.model_wrapped)
        if ddp is not self._ddp:  # a second train() goes on with the same
            self.state = attach_to(ddp, self._plan, self._options, trainer.accelerator.scaler)
            self._ddp = ddp
        if self.state is not None and state.global_step > 0:
            load_from_folder(self.state, self._resumes_from or _checkpoint_of(args, state))

    def on_save(self, args, state, control, **kwargs):
        if self.state is not None and not args.save_only_model:
            save_in_folder(self.state, _checkpoint_of(args, state))


def _checkpoint_of(args, state):
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
