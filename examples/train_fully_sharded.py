# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Trains on scikit-learn's digits a net that `fully_shard` (FSDP2) splits over the ranks of each machine, gradients
between machines compressed by Cortado.

    torchrun --nproc-per-node 4 examples/train_fully_sharded.py --shards 2
    torchrun --nproc-per-node 4 examples/train_fully_sharded.py --shards 2 --epochs 20 --folder more \
        --resume digits_fully_sharded

`--shards` is how many ranks share a replica: those of a machine; here four ranks are two machines. `--method` is any
Cortado codec string.
"""

import argparse
import sys
from pathlib import Path

import cortado
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from train_digits import BATCH, read_digits, small_net


def save(folder, mesh, model, optimizer, reducer, epochs):
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "epochs": epochs, "mesh": tuple(mesh.shape)}
    checkpoint.save(saved, checkpoint_id=folder)
    torch.save(reducer.state_dict(), Path(folder, f"cortado_{dist.get_rank()}.pt"))  # what this rank still owes


def resume(folder, mesh, model, optimizer, reducer):
    """How many epochs are done."""
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "epochs": 0, "mesh": (0, 0)}
    checkpoint.load(saved, checkpoint_id=folder)
    if saved["mesh"] != tuple(mesh.shape):  # what a rank owes is of its own shards
        (machines, ranks), (here, ranks_here) = saved["mesh"], mesh.shape
        sys.exit(f"{folder}: saved by {machines} machines of {ranks} ranks, here are {here} of {ranks_here}")
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    reducer.load_state_dict(torch.load(Path(folder, f"cortado_{dist.get_rank()}.pt"), weights_only=True))
    return saved["epochs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--shards", type=int, default=2, help="ranks that share a replica of the model")
    parser.add_argument("--method", default="quant(bits=4)", help="how the gradients travel between replicas")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--folder", default="digits_fully_sharded", help="for a checkpoint at the end")
    parser.add_argument("--resume", help="the folder of a checkpoint")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if arguments.shards < 1 or world % arguments.shards:
        parser.error(f"--shards {arguments.shards}: expected a divisor of the {world} ranks")

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world // arguments.shards, arguments.shards), mesh_dim_names=("replicate", "shard"))
    model = small_net()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    reducer = cortado.Reducer(model, arguments.method, process_group=mesh["replicate"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done = resume(arguments.resume, mesh, model, optimizer, reducer) if arguments.resume else 0

    images, labels = read_digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # equal on all ranks
    held_out, mine = order[:360], order[360:][rank::world]
    mine = mine[: 1437 // world]  # the same number of batches on every rank
    for epoch in range(done, arguments.epochs):
        shuffle = torch.Generator().manual_seed(epoch)
        for chosen in mine[torch.randperm(len(mine), generator=shuffle)].split(BATCH):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            reducer.wait()
            optimizer.step()
        with torch.no_grad():
            right = model(images[held_out]).argmax(1) == labels[held_out]
        if rank == 0:
            accuracy = 100 * right.float().mean().item()
            print(f"epoch {epoch + 1:2}  loss {loss.item():.3f}  accuracy {accuracy:.1f} %")
    save(arguments.folder, mesh, model, optimizer, reducer, max(done, arguments.epochs))
    if rank == 0:
        print(reducer.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
