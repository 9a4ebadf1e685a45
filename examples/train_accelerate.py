# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Trains on scikit-learn's digits with Hugging Face Accelerate, gradients compressed by Cortado.

    ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/train_accelerate.py
    ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/train_accelerate.py --epochs 20 --resume digits_accelerate

Needs `pip install accelerate`. `--method` is any Cortado codec string, or `ddp` for PyTorch's own all-reduce.
"""

import argparse
from pathlib import Path

import cortado
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split
from train_digits import BATCH, read_digits, small_net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="acp(rank=4)", help="how the gradients travel")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="digits_accelerate", help="for a checkpoint at the end")
    parser.add_argument("--resume", help="the folder of a checkpoint")
    arguments = parser.parse_args()

    by_epoch = DataLoaderConfiguration(use_seedable_sampler=True)  # shuffles a resumed epoch as it would have been
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=by_epoch)
    set_seed(0)
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    train, held_out = random_split(TensorDataset(*read_digits()), (1437, 360))
    batches = DataLoader(train, BATCH, shuffle=True)
    model, optimizer, batches = accelerator.prepare(net, optimizer, batches)
    state = None
    if arguments.method != "ddp":
        state = cortado.accelerate.attach(accelerator, model, arguments.method)
    done = 0
    if arguments.resume:
        accelerator.load_state(arguments.resume)
        done = int(Path(arguments.resume, "epochs").read_text())
    for epoch in range(done, arguments.epochs):
        batches.set_epoch(epoch)
        for images, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state(arguments.folder)
    if accelerator.is_main_process:
        Path(arguments.folder, "epochs").write_text(str(arguments.epochs))
        with torch.no_grad():
            images, labels = held_out[:]
            right = (accelerator.unwrap_model(model)(images).argmax(1) == labels).float().mean()
        print(f"accuracy {100 * right.item():.1f} %")
        if state is not None:
            print(cortado.report(state))
    accelerator.end_training()


if __name__ == "__main__":
    main()
