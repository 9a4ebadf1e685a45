# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT-2 on Python's own sources with the Trainer of Transformers, gradients compressed by Cortado.

    torchrun --nproc-per-node 2 examples/train_transformers.py
    torchrun --nproc-per-node 2 examples/train_transformers.py --steps 200 --resume

Needs `pip install transformers accelerate`. `--method` is any Cortado codec string, or `ddp` for PyTorch's own
all-reduce.
"""

import argparse
import sysconfig
from pathlib import Path

import cortado
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

CONTEXT = 128  # bytes a sample


def samples_of_text() -> list[dict]:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)
    windows = torch.frombuffer(bytearray(text[: len(text) // CONTEXT * CONTEXT]), dtype=torch.uint8)
    return [{"input_ids": window, "labels": window} for window in windows.view(-1, CONTEXT).long()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="acp(rank=4)", help="how the gradients travel")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="gpt2_transformers", help="for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    arguments = parser.parse_args()

    set_seed(0)
    shape = {"n_positions": CONTEXT, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **shape))
    training = TrainingArguments(
        arguments.folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_steps=50,
        use_cpu=True,
        report_to="none",
    )
    trainer = Trainer(model, training, train_dataset=samples_of_text())
    compression = None
    if arguments.method != "ddp":
        compression = cortado.transformers.attach(trainer, arguments.method)
    trainer.train(resume_from_checkpoint=arguments.resume)
    if trainer.is_world_process_zero() and compression is not None and compression.state is not None:
        print(cortado.report(compression.state))


if __name__ == "__main__":
    main()
