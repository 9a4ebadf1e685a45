# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Cortado with Lightning.

    trainer = lightning.Trainer(strategy="ddp", callbacks=[cortado.lightning.GradientCompression()])

Its checkpoints then hold what training needs to resume: the states of all ranks, gathered by rank 0.
"""

import sys

import torch.distributed as dist

from .agreement import on_all_ranks
from .frameworks import attach_to, load_on_all_ranks

# One program comes as two packages, each with a Callback of its own.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

_KEY = "cortado"  # in checkpoints


class GradientCompression(Callback):
    """cortado.attach() for the model that fit() trains with strategy="ddp".

    plan and options: as for cortado.attach(). grad_scaler is that of the precision plugin, if not said otherwise, and
    where the processes are connected by NCCL alone the exchange gets a process group of Gloo. ``state`` is that of
    cortado.attach() once training begins; with a single process that is not wrapped in DDP it stays None.
    """

    def __init__(self, plan="auto", **options):
        self.state = None
        self._plan = plan
        self._options = options
        self._saved = None  # while a checkpoint is resumed from: the list of states it holds, empty where it holds none

    def on_train_start(self, trainer, pl_module):
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.state = attach_to(trainer.strategy.model, self._plan, self._options, scaler)
        saved, self._saved = self._saved, None
        if self.state is None or saved is None:
            return
        rank = self.state._group.rank
        # load_state_dict() refuses another rank's, unless there were more ranks or fewer.
        own = saved[rank] if rank < len(saved) else next(iter(saved), None)
        load_on_all_ranks(self.state, "the checkpoint", own and (lambda: own))

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.state.fn == "fit":  # validate() and test() read checkpoints, too
            self._saved = checkpoint.get(_KEY, [])

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if self.state is None:
            return
        group = self.state._group
        with on_all_ranks(group, "could not save its state", self.state._engine.timeout_s):
            own = self.state.state_dict()
        states = [None] * group.world_size if group.rank == 0 else None
        dist.gather_object(own, states, group=group._group, group_dst=0)
        if states is not None:
            checkpoint[_KEY] = states
