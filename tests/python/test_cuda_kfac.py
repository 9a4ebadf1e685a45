# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""K-FAC on a real CUDA device: what it makes of gradients is near what the CPU makes of them, activations and output
gradients are read late, their memory is overwritten as soon as it is free, and no hook makes a thread wait for the
device."""

import os

import cortado
import pytest
import torch
from cortado.kfac_device import VARIABLE
from test_cuda_training import DELAY_CYCLES, no_device_wide_wait
from test_kfac import QUIET, Net, batch
from test_kfac_device import CUDA

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and os.path.exists(CUDA)), reason=f"no CUDA device, or no {CUDA}"
)

BOUND = 5e-3  # of fp32 products on both sides, through eigenvectors; the convolutions are PyTorch's


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setenv(VARIABLE, CUDA)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Late:
    """A _core.Kfac that reads every batch late: behind a stream that sleeps when what it waits for is there."""

    def __init__(self, core):
        self._core = core
        self._stream = torch.cuda.Stream()

    def __getattr__(self, name):
        return getattr(self._core, name)

    def add_batch(self, *arguments):
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(DELAY_CYCLES)
        self._core.add_batch(*arguments[:-1], self._stream.cuda_stream)


def backward(model, step, device, scale=1.0):
    model.zero_grad()
    inputs, labels = (each.to(device) for each in batch(step))
    loss = torch.nn.functional.cross_entropy(model(inputs), labels) * scale
    if device.type == "cpu":
        loss.backward()
        return
    with no_device_wide_wait():
        loss.backward()


def delay(model, kfac):
    """Gradients of outputs are computed late, K-FAC reads later, and memory that is free is overwritten meanwhile."""
    add, sizes = kfac._batches.add, set()
    kfac._batches._core = Late(kfac._core)

    def noted(layer, is_activations, values, *arguments, **keywords):
        sizes.add(values.numel())
        add(layer, is_activations, values, *arguments, **keywords)

    def on_backward(_module, _gradients):
        torch.cuda._sleep(DELAY_CYCLES)
        _nans = [torch.full((size,), float("nan"), device="cuda") for size in sizes for _ in range(4)]

    kfac._batches.add = noted
    for module in model.modules():
        if not list(module.children()):
            module.register_full_backward_pre_hook(on_backward)


def gradients_after(device, options, steps=3, scale=1.0):
    model = Net().to(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), options.get("grad_scaler")
    kfac = cortado.KFAC(model, **options, **QUIET)
    if device.type == "cuda":
        delay(model, kfac)
    for step in range(steps):
        backward(model, step, device, scale)
        if scaler is not None:
            scaler.unscale_(optimizer)
        assert kfac.step()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
    return torch.cat([p.grad.flatten().cpu() for p in model.parameters()]), kfac


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compute_method": "inverse", "damping": 0.1},
        {"pi_correction": True, "damping": 0.1},
        {"factor_update_steps": 2, "inv_update_steps": 2},
    ],
)
def test_is_near_the_cpu(options):
    found, kfac = gradients_after(torch.device("cuda", 0), options)
    expected, _ = gradients_after(torch.device("cpu"), options)
    assert kfac.report().to_dict()["runs_on"] == "device"
    assert (found - expected).norm() < BOUND * expected.norm()


def test_little_may_be_held(monkeypatch):
    """So that the computing stream waits, and memory is used again within a step."""
    monkeypatch.setattr("cortado.kfac_device.MOST_HELD_BYTES", 1)
    found, _ = gradients_after(torch.device("cuda", 0), {})
    expected, _ = gradients_after(torch.device("cpu"), {})
    assert (found - expected).norm() < BOUND * expected.norm()


def test_with_a_grad_scaler():
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    scaler.scale(torch.ones((), device="cuda"))  # its scale is on the device now
    found, _ = gradients_after(torch.device("cuda", 0), {"grad_scaler": scaler}, scale=256.0)
    expected, _ = gradients_after(torch.device("cpu"), {})
    assert (found - expected).norm() < BOUND * expected.norm()


def train(me, options, uses_ddp):
    """Two ranks on one device; replicas are compared by Rank."""
    device = torch.device("cuda", 0)
    os.environ[VARIABLE] = CUDA
    model = Net().to(device)
    model = me.wrap(model) if uses_ddp else model
    if not uses_ddp:
        me._models.append(model)
    kfac = cortado.KFAC(model, timeout_s=60, **options, **QUIET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        inputs, labels = (each.to(device) for each in batch(step * me.world_size + me.rank))
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        assert kfac.step()
        optimizer.step()


@pytest.mark.parametrize("uses_ddp", [True, False])
@pytest.mark.parametrize("options", [{}, {"compression": "compso(bound=4e-3)"}, {"strategy": "dp-kfac"}])
def test_replicas_are_equal(pools, options, uses_ddp):
    pools(2).run(train, options=options, uses_ddp=uses_ddp)
