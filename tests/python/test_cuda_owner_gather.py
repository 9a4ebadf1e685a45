# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""CompressedAllGather of tensors on a real CUDA device: they are computed late, and the bits are those of the CPU."""

import cortado
import pytest
import torch
from test_cuda_training import DELAY_CYCLES
from test_owner_gather import as_strided, own_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def gather_late_tensors(me, codec):
    tensors, owners, _ = own_values(me, 0)
    on_cpu = cortado.CompressedAllGather(tensors, owners, codec, error_feedback=True)
    on_device = cortado.CompressedAllGather([t.cuda() for t in tensors], owners, codec, error_feedback=True)
    for step in range(4):
        tensors = own_values(me, step)[0]
        moved = [tensor.cuda() for tensor in tensors]
        torch.cuda._sleep(DELAY_CYCLES)
        moved = [as_strided(tensor * 1) for tensor in moved]
        on_device(moved)
        on_cpu(tensors)
        for there, here in zip(moved, tensors, strict=True):
            assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("world_size", [2, 6])  # with six, one owns nothing
def test_tensors_on_a_device(pools, world_size):
    pools(world_size).run(gather_late_tensors, codec="quant(bits=6)")
