# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Whether this build trains on CUDA tensors over Gloo: a few steps of one rank. Prints why not, and ends with 1."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 6  # beyond the dense ones at the start


def main() -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        import cortado

        model = DistributedDataParallel(torch.nn.Linear(256, 256).cuda())
        cortado.attach(model, "acp(rank=4)")
        for _ in range(STEPS):
            model(torch.randn(16, 256, device="cuda")).square().mean().backward()
        torch.cuda.synchronize()
    except Exception as error:  # whatever it is, it is the reason
        print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
