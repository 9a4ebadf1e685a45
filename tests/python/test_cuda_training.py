# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""On a real CUDA device: what arrives has the bits that the engine makes of the same gradients in host memory; where
low rank is projected on the device, nearly so."""

import contextlib
import os

import cortado
import pytest
import torch
import torch.distributed as dist
from nets import AUTO_STEPS, COMPOSED, DGC, EXACT, QUANT, RANDK, SIGN, TOPK, VARYING, make_batch, make_net
from ranks import fingerprint
from test_ddp_overflow import distance
from test_ddp_training import MODELS
from test_device_engine import CUDA, VARIABLE, parameters_of
from test_plan import TWO, make_plan
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STEPS = 5
LOW_RANK = ["acp", "acp(rank=2, sides=alternate)", "acp(rank=2, wire=bf16, start_step=1)", "power"]
CODECS = ["none", "cast(bf16)", *LOW_RANK, SIGN, TOPK, DGC, RANDK, QUANT, COMPOSED, VARYING, EXACT]
DELAY_CYCLES = 20_000_000  # some 10 ms of the device before each gradient, so that what does not wait reads too early


class Watched:
    """A model on the device, whose gradients come late and are noted before they are averaged."""

    def __init__(self, me, net, plan, front_end, group=None, **options):
        self.net = net
        device = me.rank if group is not None else 0
        self._device = torch.device("cuda", device)
        net.to(self._device)
        self.local = {}
        for name, parameter in net.named_parameters():
            parameter.register_hook(self._note(name))
        if front_end == "reducer":
            self.model = net
            self.cortado = cortado.Reducer(net, plan, process_group=group, verbose=False)
        else:
            self.model = DistributedDataParallel(net, bucket_cap_mb=0.002, process_group=group, **options)
            self.cortado = cortado.attach(self.model, plan, verbose=False)
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def _note(self, name):
        def hook(gradient):
            torch.cuda._sleep(DELAY_CYCLES)
            self.local[name] = gradient.clone()

        return hook

    def step(self, batch):
        """Returns local and averaged gradients, in host memory."""
        inputs, labels = (each.to(self._device) for each in batch)
        self._optimizer.zero_grad()
        output = self.model(inputs.to(next(self.net.parameters()).dtype)).float()
        loss = torch.nn.functional.cross_entropy(output, labels)
        with no_device_wide_wait():
            loss.backward()
            if self.model is self.net:
                self.cortado.wait()
        self._optimizer.step()
        averaged = {name: p.grad.cpu() for name, p in self.net.named_parameters()}
        return {name: gradient.cpu() for name, gradient in self.local.items()}, averaged


@contextlib.contextmanager
def no_device_wide_wait():
    """What makes the calling thread wait for the device raises; looking at an event does not."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Twin:
    """The same gradients, averaged in host memory."""

    def __init__(self, net, plan, group):
        self._net = net
        self.cortado = cortado.Reducer(net, plan, process_group=group, verbose=False)

    def step(self, gradients):
        self._net.zero_grad()
        named = dict(self._net.named_parameters())
        sum((named[name] * gradient).sum() for name, gradient in gradients.items()).backward()
        self.cortado.wait()
        return {name: parameter.grad for name, parameter in named.items()}


ON_GPU = make_plan(
    TWO,
    ("quant(bits=4)", "encode@gpu all_to_all@all decode@gpu encode@gpu all_gather@all decode@gpu"),
    ("float_rans", "encode@gpu all_gather@all decode@cpu"),
    ("topk(density=0.2)", "encode@cpu all_gather@all decode@gpu"),
)


def compare(me, plan, front_end, model=None, two_devices=False, on_device=False, library=None, **options):
    os.environ[VARIABLE] = CUDA if on_device else library or "none, so that gradients are copied"
    group = dist.new_group(backend="cpu:gloo,cuda:nccl") if two_devices else None
    if two_devices:
        torch.cuda.set_device(me.rank)
    make = MODELS[model] if model else make_net
    watched = Watched(me, make(), plan, front_end, group, **options)
    twin = Twin(make(), plan, group)
    for step in range(STEPS):
        local, averaged = watched.step(make_batch(me.rank, step))
        expected = twin.step(local)
        for name, gradient in averaged.items():
            if on_device:
                close = (gradient - expected[name]).norm() <= 1e-3 * expected[name].norm()
                assert close, f"step {step}: {name}"
            else:
                assert torch.equal(gradient, expected[name]), f"step {step}: {name}"
    report = watched.cortado.report().to_dict()
    assert report["runs_on"]["engine"] == ("device" if on_device else "cpu"), report["runs_on"]
    assert on_device or report["device_wait_ns"] > 0
    if library is not None:
        assert report["runs_on"]["reason"] == "a plan's sums are made on the host", report["runs_on"]
    return fingerprint(watched.net.cpu())


@pytest.mark.parametrize("front_end", ["ddp", "reducer"])
@pytest.mark.parametrize("codec", CODECS)
def test_has_the_bits_of_host_memory(pools, codec, front_end):
    assert len(set(pools(2).run(compare, plan=codec, front_end=front_end))) == 1


@pytest.mark.skipif(not os.path.exists(CUDA), reason=f"{CUDA} is not built")
@pytest.mark.parametrize("front_end", ["ddp", "reducer"])
@pytest.mark.parametrize("codec", [*LOW_RANK, SIGN, QUANT, TOPK, RANDK, "compso(min_elems=0)"])
def test_is_compressed_on_the_device(pools, codec, front_end):
    assert len(set(pools(2).run(compare, plan=codec, front_end=front_end, on_device=True))) == 1


@pytest.mark.skipif(not os.path.exists(CUDA), reason=f"{CUDA} is not built")
def test_a_plan_encodes_on_the_device(pools):
    """The twin, in host memory, has no device and does it on the CPU."""
    assert len(set(pools(2).run(compare, plan=ON_GPU, front_end="ddp", library=CUDA))) == 1


def train_scaled(me, plan, library):
    os.environ[VARIABLE] = library
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2)
    model = DistributedDataParallel(make_net().to("cuda:0"))
    state = cortado.attach(model, plan, grad_scaler=scaler, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        inputs, labels = (each.to("cuda:0") for each in make_batch(me.rank, step))
        loss = scaler.scale(torch.nn.functional.cross_entropy(model(inputs), labels))
        with no_device_wide_wait() if library == CUDA else contextlib.nullcontext():
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() > 64.0
    report = state.report().to_dict()
    assert report["runs_on"]["engine"] == ("device" if library == CUDA else "cpu")
    assert report["non_finite_steps"] == 0
    return parameters_of(model.cpu()), fingerprint(model)


def train_scaled_both(me, plan):
    """The other engine is in host memory, and asks for the scale."""
    found, replica = train_scaled(me, plan, CUDA)
    expected, _ = train_scaled(me, plan, CUDA + ".none")
    return distance(found, expected), replica


@pytest.mark.skipif(not os.path.exists(CUDA), reason=f"{CUDA} is not built")
@pytest.mark.parametrize("codec", ["acp(rank=2)", TOPK])
def test_the_scale_of_the_loss_is_not_waited_for(pools, codec):
    (error, replica), (_, other) = pools(2).run(train_scaled_both, plan=codec)
    assert replica == other
    assert error < 1e-3 if codec.startswith("acp") else error == 0


def run_auto(me):
    os.environ[VARIABLE] = CUDA
    watched = Watched(me, make_net(), "auto(drift=100)", "ddp")
    for step in range(AUTO_STEPS):
        watched.step(make_batch(me.rank, step))
    decision = watched.cortado.decision()
    assert decision["decided"]
    return decision["reason"], fingerprint(watched.net.cpu())


@pytest.mark.skipif(not os.path.exists(CUDA), reason=f"{CUDA} is not built")
def test_auto_decides_alike_on_all_ranks(pools):
    assert len(set(pools(2).run(run_auto))) == 1


@pytest.mark.parametrize("codec", ["acp(rank=2)", TOPK])
def test_gradients_may_be_views_of_buckets(pools, codec):
    pools(2).run(compare, plan=codec, front_end="ddp", gradient_as_bucket_view=True)


@pytest.mark.parametrize("front_end", ["ddp", "reducer"])
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("Tiny", "Empty")])
def test_parameters_of_every_kind(pools, model, front_end):
    pools(2).run(compare, plan="acp(rank=2, min_compression_rate=0)", front_end=front_end, model=model)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device; NCCL wants one a rank")
def test_the_rest_may_use_nccl(pools):
    pools(2).run(compare, plan="acp(rank=2)", front_end="ddp", two_devices=True)


def overflow(me, plan):
    watched = Watched(me, make_net(), plan, "ddp")
    for step in range(STEPS):
        poison = None
        if step == 3 and me.rank == 1:
            poison = watched.net[0].weight.register_hook(lambda gradient: gradient * float("inf"))
        _, averaged = watched.step(make_batch(me.rank, step))
        is_finite = all(gradient.isfinite().all() for gradient in averaged.values())
        assert is_finite == (step != 3)
        if poison is not None:
            poison.remove()
        if not is_finite:
            break
    state = watched.cortado.state_dict()
    assert all(entry["residual"].isfinite().all() for entry in state["tensors"].values())
    return watched.cortado.report().to_dict()["non_finite_steps"]


@pytest.mark.parametrize("codec", ["acp(rank=2)", TOPK])
def test_a_step_that_is_not_finite_is_undone(pools, codec):
    assert pools(2).run(overflow, plan=codec) == [1, 1]
