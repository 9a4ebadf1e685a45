# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What the names of methods of benchmarks/training/second_order.py mean; the broadcasts of its baseline."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

from second_order_methods import parse_method


def test_a_codec_stands_for_all_steps():
    method = parse_method("kfac + compso(bound=2e-2) + feedback")
    assert (method.host, method.compression(), method.feedback) == ("kfac", "compso(bound=2e-2)", True)
    assert parse_method("kfac").compression() == "none"


def test_a_schedule_gives_each_step_its_codec():
    method = parse_method("kfac + compso(bound=1e-1, filter=off) to step 80, compso(bound=2e-2) + feedback")
    codec_of = method.compression()
    assert [codec_of(step) for step in (0, 79)] == ["compso(bound=1e-1, filter=off)"] * 2
    assert [codec_of(step) for step in (80, 1000)] == ["compso(bound=2e-2)"] * 2
    assert method.feedback


@pytest.mark.parametrize("name", ["sdg", "sgd + cast(bf16)", "kfac + quant(bits=4) + quant(bits=8)"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="method"):
        parse_method(name)


class Counting:
    """A process group whose broadcasts are counted."""

    def __init__(self, group):
        self._group = group
        self.broadcasts = 0

    def __getattr__(self, name):
        return getattr(self._group, name)

    def broadcast(self, *arguments):
        self.broadcasts += 1
        return self._group.broadcast(*arguments)


def one_step(me, layers, broadcasts):
    """Returns the broadcasts of it, and the gradients."""
    from second_order_worker import make_kfac

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    config = {
        "strategy": "mem-opt",
        "compute_method": "eigen",
        "factor_update_steps": 1,
        "inv_update_steps": 1,
        "damping": 0.03,
        "skip_layers": [],
    }
    kfac = make_kfac(model, config, parse_method("kfac + broadcasts" if broadcasts else "kfac"), 0.1)
    kfac._group._group = counted = Counting(kfac._group._group)
    model(torch.randn(8, 2, generator=torch.Generator().manual_seed(me.rank))).square().mean().backward()
    kfac.step()
    return counted.broadcasts, [parameter.grad.numpy() for parameter in model.parameters()]


@pytest.mark.parametrize("layers", [54, 144])  # of ResNet-50 and BERT-large
def test_broadcasts_of_a_step_are_as_many_as_layers(pools, layers):
    (count, of_layers), _ = pools(2).run(one_step, layers=layers, broadcasts=True)
    (none, together), _ = pools(2).run(one_step, layers=layers, broadcasts=False)
    assert (count, none) == (layers, 0)
    assert all((a == b).all() for a, b in zip(of_layers, together, strict=True))
