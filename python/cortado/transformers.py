# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Cortado with the Trainer of Hugging Face Transformers.

    trainer = Trainer(model, arguments, ...)
    cortado.transformers.attach(trainer)
    trainer.train()

Each checkpoint then has a file cortado_RANK.pt for each rank, and trainer.train(resume_from_checkpoint=True) reads it.
"""

import functools
import warnings
import weakref
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from .frameworks import attach_to, load_from_folder, save_in_folder
from .parameters import without_compile


def attach(trainer, plan="auto", **options):
    """cortado.attach() for the model of ``trainer``, as soon as train() has wrapped it. Call it on every process.

    plan and options: as for cortado.attach(). grad_scaler is the trainer's, if not said otherwise, and where the
    processes are connected by NCCL alone the exchange gets a process group of Gloo.

    Returns the callback, whose ``state`` is that of cortado.attach() once training begins; with a single process there
    is nothing to exchange, and it stays None.
    """
    callback = GradientCompression(trainer, plan, options)
    trainer.add_callback(callback)
    train = trainer.train

    @functools.wraps(train)
    def train_from(resume_from_checkpoint=None, *arguments, **named):  # callbacks are not told what it was given
        callback.resumes_from = resume_from_checkpoint
        return train(resume_from_checkpoint, *arguments, **named)

    trainer.train = train_from
    return callback


class GradientCompression(TrainerCallback):
    """Made by attach()."""

    def __init__(self, trainer, plan, options):
        self.state = None
        self.resumes_from = None  # what train() was given
        self._ddp = None
        self._trainer = weakref.ref(trainer)
        self._plan = plan
        self._options = options

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self._trainer()
        ddp = without_compile(trainer.model_wrapped)
        if ddp is not self._ddp:  # a second train() goes on with the same
            self.state = attach_to(ddp, self._plan, self._options, trainer.accelerator.scaler)
            self._ddp = ddp
        if self.state is not None and self.resumes_from:
            is_last = self.resumes_from is True
            load_from_folder(self.state, get_last_checkpoint(args.output_dir) if is_last else self.resumes_from)

    def on_save(self, args, state, control, **kwargs):
        if self.state is None or args.save_only_model:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if folder.is_dir():
            save_in_folder(self.state, folder)
        else:  # a search for hyperparameters has folders of its own
            warnings.warn(f"cortado: there is no {folder}: its state is not in the checkpoint", stacklevel=2)
