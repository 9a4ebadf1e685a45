# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Gradients that are copied to the engine and back beside the computation, tried without a GPU: on a device whose
copies are late (late_device.py) every training has the bits that it has in host memory."""

import contextlib
import time
from types import SimpleNamespace

import cortado
import pytest
import torch
import torch.distributed as dist
from cortado.parameters import engine_tensors, in_memory_order
from late_device import LateEvent, LateSideStream, late_device
from nets import (
    CODECS,
    DGC,
    FEATURES,
    RANDK,
    SIGN,
    TOPK,
    VARYING,
    gradients_of,
    loss_of,
    make_batch,
    make_net,
    train,
    train_anew,
)
from ranks import Pool, fingerprint
from test_ddp_bad_input import error_of
from test_ddp_overflow import LAST_READY, compare_with_skipping, poison, train_through
from test_ddp_training import MODELS
from test_plan import MIXED
from test_reducer import reduced, train_reduced
from torch.nn.parallel import DistributedDataParallel

SMALL_BUCKETS = {"bucket_cap_mb": 0.002}  # some of them under way at a time


def train_both(me, plan, **options):
    """The bits a training ends with in host memory, and on a late device."""
    expected = train_anew(me, plan, **SMALL_BUCKETS, **options)
    with late_device():
        return train_anew(me, plan, **SMALL_BUCKETS, **options), expected


@pytest.mark.parametrize("codec, world_size", [*((codec, 2) for codec in CODECS), (SIGN, 1), ("acp", 3), (VARYING, 3)])
def test_ddp_has_the_bits_of_host_memory(pools, codec, world_size):
    for view in (True, False):
        late, expected = pools(world_size).run(train_both, plan=codec, gradient_as_bucket_view=view)[0]
        assert late == expected


@pytest.mark.parametrize("world_size", [4])
def test_a_plan_has_the_bits_of_host_memory(pools, world_size):
    late, expected = pools(world_size).run(train_both, plan=MIXED)[0]
    assert late == expected


def train_unusual(me, plan, model, through_ddp):
    ends = []
    for device in (contextlib.nullcontext, late_device):
        with device():
            net = MODELS[model]()
            if through_ddp:
                train(me, me.attach(net, plan, **SMALL_BUCKETS), 4)
            else:
                train_reduced(me, reduced(me, net, plan), 4)
            ends.append(fingerprint(net))
    return ends


@pytest.mark.parametrize("through_ddp", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("codec", ["none", "acp(rank=2, min_compression_rate=0, start_step=1)", TOPK])
def test_parameters_of_every_kind(pools, codec, model, through_ddp):
    for expected, late in pools(2).run(train_unusual, plan=codec, model=model, through_ddp=through_ddp):
        assert late == expected


class Branches(torch.nn.Module):
    """A parameter that no rank uses, and one that the last rank uses only in every other step."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.unused, self.rare = make_net(), torch.nn.Linear(8, 8), torch.nn.Linear(FEATURES, 8)
        self._rank, self._step = rank, 0

    def forward(self, x):
        self._step += 1
        return self.body(x) + (self.rare(x) if self._rank == 1 and self._step % 2 else 0)


def use_the_reducer(me, plan):
    """Steps of two backward passes, and parameters without a gradient."""
    net = reduced(me, Branches(me.rank), plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(0, 8, 2):
        with net.cortado.no_sync():
            loss_of(net, make_batch(me.rank, step)).backward()
        loss_of(net, make_batch(me.rank, step + 1)).backward()
        net.cortado.wait()
        assert net.unused.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    return fingerprint(net)


def use_the_reducer_both(me, plan):
    expected = use_the_reducer(me, plan)
    with late_device():
        return use_the_reducer(me, plan), expected


@pytest.mark.parametrize("codec", ["none", "acp(rank=2)", TOPK, RANDK])
def test_reducer_has_the_bits_of_host_memory(pools, codec):
    for late, expected in pools(2).run(use_the_reducer_both, plan=codec):
        assert late == expected


def undo_both(me, plan, view):
    """A step that is not finite, on a late device and in host memory where DDP keeps the gradients."""
    poisoned = {3: (LAST_READY, float("nan")), 5: ("4.weight", float("inf"))}
    expected, _ = train_through(me, plan, False, poisoned, skip=False)
    with late_device():
        late, _ = train_through(me, plan, view, poisoned, skip=False)
        error, _ = compare_with_skipping(me, plan, view, poisoned)
    return fingerprint(late.module), fingerprint(expected.module), error


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("codec", ["acp(rank=2)", "power(rank=2)", TOPK, DGC])
def test_a_step_that_is_not_finite_is_undone(pools, codec, view):
    for late, expected, error in pools(2).run(undo_both, plan=codec, view=view):
        assert late == expected and error < 1e-5


def undo_in_the_reducer(me, plan):
    net = reduced(me, make_net(), plan)
    for step in range(5):
        is_bad = step == 3
        through = poison(SimpleNamespace(module=net), LAST_READY, float("nan"))
        with through if is_bad and me.rank == 1 else contextlib.nullcontext():
            loss_of(net, make_batch(me.rank, step)).backward()
        net.cortado.wait()
        assert is_bad != all(gradient.isfinite().all() for gradient in gradients_of(net).values())
        net.zero_grad()
    return {name: tensor["residual"].tolist() for name, tensor in net.cortado.state_dict()["tensors"].items()}


def undo_in_the_reducer_both(me, plan):
    expected = undo_in_the_reducer(me, plan)
    with late_device():
        return undo_in_the_reducer(me, plan), expected


@pytest.mark.parametrize("codec", ["acp(rank=2)", TOPK])
def test_reducer_undoes_a_step_that_is_not_finite(pools, codec):
    for late, expected in pools(2).run(undo_in_the_reducer_both, plan=codec):
        assert late == expected


class WatchedScaler(torch.amp.GradScaler):
    """Notes on which stream its scale was read: of a device, that waits for all the stream was given."""

    def __init__(self):
        super().__init__("cpu", init_scale=64.0, growth_interval=2)
        self.cortado, self.streams = None, []

    def get_scale(self):
        if self.cortado is not None and self.cortado._side_stream is not None:
            cuda = self.cortado._side_stream._cuda
            cuda.current.run_to(cuda.current.given)
            self.streams.append("compute" if cuda.current is cuda.compute else "other")
        return super().get_scale()


def train_scaled(me, through_ddp):
    scaler, net = WatchedScaler(), make_net()
    if through_ddp:
        model = me.attach(net, "acp(rank=2)", grad_scaler=scaler, **SMALL_BUCKETS)
    else:
        model = reduced(me, net, "acp(rank=2)", grad_scaler=scaler)
    scaler.cortado = model.cortado
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(6):
        scaler.scale(loss_of(model, make_batch(me.rank, step))).backward()
        if not through_ddp:
            model.cortado.wait()
        scaler.step(optimizer)
        scaler.cortado, attached = None, scaler.cortado  # update() reads it too
        scaler.update()
        scaler.cortado = attached
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    return fingerprint(net), scaler.streams[:-1]


def train_scaled_both(me, through_ddp):
    expected, _ = train_scaled(me, through_ddp)
    with late_device():
        return train_scaled(me, through_ddp), expected


@pytest.mark.parametrize("through_ddp", [True, False])
def test_the_scale_of_the_loss_is_read_without_a_wait_for_the_backward_pass(pools, through_ddp):
    for (late, streams), expected in pools(2).run(train_scaled_both, through_ddp=through_ddp):
        assert late == expected
        assert streams == ["other"] * 6


def run_auto(me, through_ddp):
    with late_device():
        net = make_net()
        if through_ddp:
            model = me.attach(net, "auto", **SMALL_BUCKETS)
            train(me, model, 30)
        else:
            model = reduced(me, net, "auto")
            train_reduced(me, model, 30)
    assert all(p.isfinite().all() for p in net.parameters())
    return model.cortado.report().to_dict()["steps"]


@pytest.mark.parametrize("through_ddp", [True, False])
def test_auto_runs(pools, through_ddp):
    assert pools(2).run(run_auto, through_ddp=through_ddp) == [30, 30]


# ---- that the late device would show it ------------------------------------------------------------------------------


class DoesNotFollow(LateSideStream):
    def follow(self):
        pass


class OverwritesTooEarly(LateSideStream):
    """Follows only to fetch."""

    def follow(self):
        pass

    def fetch(self, host, tensor):
        super().follow()
        super().fetch(host, tensor)


class ReadsTooEarly(LateSideStream):
    def event(self):
        return AlwaysReached()


class AlwaysReached(LateEvent):
    def query(self):
        return True


class CompletesOnAnotherStream(LateSideStream):
    def complete(self, future, value):
        future.set_result(value)


class DoesNotJoin(LateSideStream):
    def join(self):
        pass


class SendsOnlyPart(LateSideStream):
    def send(self, tensor, host):
        super().send(tensor[:1], host[:1])
        tensor[1:].zero_()


def train_broken(me, side_stream, through_ddp):
    with late_device(side_stream):
        net = make_net()
        if through_ddp:
            train(me, me.attach(net, "cast(bf16)", **SMALL_BUCKETS), 2)
        else:
            train_reduced(me, reduced(me, net, "cast(bf16)"), 2)
    me._models.clear()
    return fingerprint(net)


@pytest.mark.parametrize(
    "side_stream, through_ddp",
    [
        *(
            (broken, ddp)
            for broken in (DoesNotFollow, OverwritesTooEarly, ReadsTooEarly, SendsOnlyPart)
            for ddp in (True, False)
        ),
        (CompletesOnAnotherStream, True),
        (DoesNotJoin, False),
    ],
)
def test_what_is_forgotten_shows(pools, side_stream, through_ddp):
    good = pools(2).run(train_broken, side_stream=LateSideStream, through_ddp=through_ddp)
    bad = pools(2).run(train_broken, side_stream=side_stream, through_ddp=through_ddp)
    assert bad[0] != good[0]


# ---- waiting, memory, errors -----------------------------------------------------------------------------------------


class CountingSideStream(LateSideStream):
    made = 0

    def host_memory(self, like):
        CountingSideStream.made += 1
        return super().host_memory(like)

    def event(self):
        CountingSideStream.made += 1
        return super().event()


def count_what_is_made(me, through_ddp):
    """Pieces of memory and events that exist after each step."""
    counts = []
    with late_device(CountingSideStream):
        net = make_net()
        model = me.attach(net, "acp(rank=2)", **SMALL_BUCKETS) if through_ddp else reduced(me, net, "acp(rank=2)")
        for step in range(8):
            (train if through_ddp else train_reduced)(me, model, range(step, step + 1))
            counts.append(CountingSideStream.made)
    report = model.cortado.report()
    assert 0 < report.to_dict()["device_wait_ns"] <= report.to_dict()["hook_ns"]
    assert "until all gradients had come" in str(report)
    return counts


@pytest.mark.parametrize("through_ddp", [True, False])
def test_nothing_is_made_once_buckets_stay_as_they_are(pools, through_ddp):
    for counts in pools(2).run(count_what_is_made, through_ddp=through_ddp):
        assert 0 < counts[2] == counts[-1]


class NeverReached(LateEvent):
    def query(self):
        return False


class StuckSideStream(LateSideStream):
    def event(self):
        return NeverReached()


def wait_for_a_stuck_device(me, after_s, failing):
    """A peer that is gone can keep the device waiting for ever, without any collective of ours under way."""
    start = time.monotonic()
    with late_device(StuckSideStream if me.rank == 0 else LateSideStream):
        model = DistributedDataParallel(make_net(), **SMALL_BUCKETS)
        patience_s = after_s if me.rank == 0 else 600
        state = cortado.attach(model, f"acp(rank=2, timeout_s={patience_s})", verbose=False)
        if failing and me.rank == 1:
            state._group.announce("out of luck")
            return None
        kind, text = error_of(loss_of(model, make_batch(me.rank, 0)).backward)
    return kind, text, time.monotonic() - start


@pytest.mark.parametrize("after_s, failing", [(3, False), (600, True)])
def test_a_device_that_is_never_done_is_an_error(after_s, failing):
    pool = Pool(2)  # of its own: the step is broken off
    try:
        (kind, text, seconds), other = pool.run(wait_for_a_stuck_device, after_s=after_s, failing=failing)
    finally:
        pool.close()
    assert seconds < 20
    if failing:
        assert kind == "PeerError" and "out of luck" in text, text
    else:
        assert kind == "CortadoError" and "within 3 s" in text, text
        assert other[0] == "PeerError" and "has not computed the gradients" in other[1], other


class NoMoreMemory(LateSideStream):
    def host_memory(self, like):
        raise RuntimeError("no memory can be pinned")


def attach_without_memory(me):
    start = time.monotonic()
    with late_device(NoMoreMemory if me.rank == 1 else LateSideStream):
        kind, text = error_of(cortado.Reducer, make_net(), "acp(rank=2)", verbose=False)
    return kind, text, time.monotonic() - start


def test_memory_that_one_rank_can_not_pin_is_an_error_on_all(pools):
    (kind, text, seconds), (own_kind, own_text, _) = pools(2).run(attach_without_memory)
    assert kind == "MismatchError" and "rank 1 could not make a Reducer: no memory can be pinned" in text, text
    assert own_kind == "RuntimeError" and "no memory can be pinned" in own_text
    assert seconds < 20


def attach_elsewhere(me):
    """What can't be exchanged, and is refused before anything is sent."""
    net = make_net()
    two = [("here", net[0].weight), ("there", torch.nn.Parameter(torch.empty(4, 4, device="meta")))]
    late = me.wrap(make_net())
    state, hook = cortado.ddp_hook("acp(rank=2)", late, verbose=False)
    state._device = torch.device("cuda:1")  # as if it had been there then
    late.register_comm_hook(state, hook)
    only_device = dist.new_group(backend="cuda:gloo")
    errors = {
        "two devices": error_of(cortado.Reducer, two, "acp", verbose=False),
        "meta": error_of(cortado.Reducer, two[1:], "acp", verbose=False),
        "group": error_of(cortado.Reducer, net, "acp", process_group=only_device, verbose=False),
    }
    return errors | {"moved": error_of(loss_of(late, make_batch(me.rank, 0)).backward)}


def test_what_lies_elsewhere_is_refused():
    pool = Pool(2)  # of its own: a step is broken off
    try:
        values = pool.run(attach_elsewhere)
    finally:
        pool.close()
    for errors in values:
        assert all(kind == "SpecError" for kind, _ in errors.values()), errors
        assert '"here" on cpu, "there" on meta' in errors["two devices"][1]
        assert '"there" is on meta' in errors["meta"][1]
        assert "cpu:gloo,cuda:nccl" in errors["group"][1]
        assert "was on cuda:1 when it was attached" in errors["moved"][1]


def test_rows_are_the_outermost_dimension_in_memory():
    def rows_and_cols(memory):
        return engine_tensors([("t", torch.nn.Parameter(memory), False)])[0][2:4]

    assert rows_and_cols(torch.empty(40, 24).t()) == (40, 24)
    assert rows_and_cols(torch.empty(3, 40, 16).permute(2, 0, 1)) == (3, 640)


def test_a_copy_in_memory_order_lies_where_the_gradient_does():
    parameter = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    copy = in_memory_order(parameter, torch.empty(2, 3, 4, 4, device="meta"))
    assert copy.device.type == "meta"
    assert copy.stride() == parameter.stride()
