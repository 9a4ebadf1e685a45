# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The worker of `both_ways.py`: one process a rank, one collective after the other, each in both ways."""

import sys
import time

import cortado.group
import torch
import torch.distributed as dist
from cortado.group import BYTE_CODE, TorchGroup
from trainer import emit, start_worker

SKEW_S = 0.005  # from the first rank's start to the last one's
LIMITS = {"one": sys.maxsize, "each": 0}  # of bytes, from which each way has its connection


def start_collective(group: TorchGroup, work: int, kind: str, sent: torch.Tensor, received: torch.Tensor) -> None:
    elems = sent.numel() // (1 if kind == "all_gather" else group.world_size)
    group.start(work, kind, BYTE_CODE, sent.data_ptr(), received.data_ptr(), elems, 0, None, None)


def timed_ms(group: TorchGroup, kind: str, sent: torch.Tensor, turn: int, place: int) -> float:
    received = torch.empty(group.world_size * sent.numel(), dtype=torch.uint8)
    dist.barrier()
    time.sleep(SKEW_S * place / (group.world_size - 1))
    begin = time.monotonic()
    start_collective(group, turn, kind, sent, received)
    group.wait(turn, 60.0)
    begins_and_ends = torch.tensor([begin, -time.monotonic()], dtype=torch.float64)
    dist.all_reduce(begins_and_ends[:1], dist.ReduceOp.MAX)
    dist.all_reduce(begins_and_ends[1:], dist.ReduceOp.MIN)
    return -1e3 * begins_and_ends.sum().item()


def main() -> None:
    config = start_worker()
    group = TorchGroup(None)
    group.connect_both_ways()
    turn = 0
    for kind in config["kinds"]:
        for size in config["bytes"]:  # what a rank sends to others
            block = size // (group.world_size - 1)
            elems = block if kind == "all_gather" else block * group.world_size
            sent = torch.randint(256, (elems,), dtype=torch.uint8)
            times_ms = {way: [] for way in LIMITS}
            for number in range(config["rounds"] + 1):
                place = (number + group.rank) % group.world_size  # in which ranks start: another one last each time
                ways = list(LIMITS)
                for way in ways if number // group.world_size % 2 == 0 else reversed(ways):
                    cortado.group._BOTH_WAYS_BYTES = LIMITS[way]
                    took_ms = timed_ms(group, kind, sent, turn, place)
                    turn += 1
                    if number > 0:  # congestion windows have grown
                        times_ms[way].append(took_ms)
            emit("measured", kind=kind, bytes=block * (group.world_size - 1), **times_ms)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
