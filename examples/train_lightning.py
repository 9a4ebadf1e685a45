# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Trains on scikit-learn's digits with Lightning, gradients compressed by Cortado.

    python examples/train_lightning.py --devices 2
    python examples/train_lightning.py --devices 2 --epochs 20 --resume digits_lightning/last.ckpt

Needs `pip install lightning`. `--method` is any Cortado codec string, or `ddp` for PyTorch's own all-reduce.
"""

import argparse

import cortado
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split
from train_digits import BATCH, read_digits, small_net


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def training_step(self, batch, index):
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="acp(rank=4)", help="how the gradients travel")
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="digits_lightning", help="for checkpoints")
    parser.add_argument("--resume", help="a checkpoint")
    arguments = parser.parse_args()

    lightning.seed_everything(0)
    train, held_out = random_split(TensorDataset(*read_digits()), (1437, 360))
    checkpoints = ModelCheckpoint(arguments.folder, save_last=True)
    compression = cortado.lightning.GradientCompression(arguments.method)
    callbacks = [checkpoints] if arguments.method == "ddp" else [checkpoints, compression]
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
    )
    loaders = DataLoader(train, BATCH, shuffle=True), DataLoader(held_out, BATCH)
    trainer.fit(Digits(), *loaders, ckpt_path=arguments.resume)
    if trainer.is_global_zero:
        print(f"accuracy {100 * trainer.callback_metrics['accuracy'].item():.1f} %")
        if compression.state is not None:
            print(cortado.report(compression.state))


if __name__ == "__main__":
    main()
