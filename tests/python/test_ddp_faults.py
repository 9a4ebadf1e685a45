# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""One rank raises, dies or hangs in a step: the others get an error that names it, in time, and every process ends."""

import faulthandler
import json
import os
import re
import signal
import time
from datetime import timedelta

import pytest
from cases import repeated
from nets import loss_of, make_batch, make_net, make_optimizer
from ranks import Program, free_port, slack_s
from test_plan import TWO, TWO_BY_TWO, make_plan

TIMEOUT_S = 5
ROLL_CALL_S = 5
HANG_S = 45  # after which a rank prints where it stands and ends
BROKEN_STEP = 4
NAMES = [name for name, _ in make_net().named_parameters()]
GATHERED = make_plan(TWO, ("topk(density=0.2)", "encode@cpu all_gather@all decode@cpu"), ("none", "all_reduce@all"))
IN_TWO_LEVELS = make_plan(
    TWO_BY_TWO,
    ("float_rans", "encode@cpu gather@intra all_gather@inter broadcast@intra decode@cpu"),
    ("none", "reduce_scatter@intra all_reduce@inter all_gather@intra"),
)


# ---- in a rank -------------------------------------------------------------------------------------------------------


def break_step(kind, net):
    """Something happens to this rank in the middle of its backward pass."""

    def happen(gradient):
        print(json.dumps({"broken_at": time.time()}), flush=True)
        if kind == "raises":
            raise RuntimeError("out of luck")
        if kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    net[2].weight.register_hook(happen)


def main(kind, broken_rank, rank, world_size, port, plan):
    import cortado
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    net = make_net()
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.002)
    cortado.attach(model, plan, timeout_s=TIMEOUT_S, verbose=False)
    optimizer = make_optimizer(model)
    for step in range(2 * BROKEN_STEP):
        if step == BROKEN_STEP and rank == broken_rank:
            break_step(kind, net)
        loss = loss_of(model, make_batch(rank, step))
        try:
            loss.backward()
        except cortado.PeerError as error:
            print(json.dumps({"error": str(error), "at": time.time(), "step": step}), flush=True)
            raise
        optimizer.step()
        optimizer.zero_grad()


# ---- in pytest -------------------------------------------------------------------------------------------------------


def start(kind, broken_rank, world_size, plan):
    port = free_port()
    return [Program(main, kind, broken_rank, rank, world_size, port, plan) for rank in range(world_size)]


def end(processes, broken_rank, kind):
    """Exit codes, and what each rank printed; a rank that sleeps is killed once the others have ended."""
    outputs = {}
    order = sorted(range(len(processes)), key=lambda rank: rank == broken_rank)
    try:
        for rank in order:
            if rank == broken_rank and kind == "hangs":
                assert processes[rank].returncode is None
                processes[rank].kill()
            outputs[rank] = processes[rank].communicate()
    finally:
        for process in processes:
            process.kill()
    return outputs


def check_place(error, step):
    """The error names step, tensor (of a message the first one) and stage."""
    assert f"step {step}: " in error, error
    assert any(f'"{name}"' in error for name in NAMES), error
    assert re.search(r": communicate: |operation \d+ \(\w+@", error), error


@pytest.mark.parametrize(
    "kind, broken_rank, world_size, plan",
    [
        repeated("raises", 1, 2, "acp(rank=2, bucket_cap_mib=0)"),
        ("is killed", 1, 3, "power(rank=2)"),
        ("is killed", 0, 2, "none()"),
        ("hangs", 2, 3, "acp(rank=2, timeout_s=1000)"),
        repeated("raises", 2, 3, "topk(density=0.1, min_elems=0, bucket_cap_mib=0)"),
        ("is killed", 1, 2, "sign(min_elems=0)"),
        repeated("is killed", 1, 2, GATHERED),
        ("raises", 3, 4, IN_TWO_LEVELS),
        repeated("hangs", 1, 2, GATHERED),
        ("hangs", 3, 4, IN_TWO_LEVELS),
    ],
)
def test_the_others_get_an_error_that_names_rank_tensor_and_stage_in_time(
    tmp_path, kind, broken_rank, world_size, plan
):
    if plan is IN_TWO_LEVELS:
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        plan = str(tmp_path / "plan.json")
    processes = start(kind, broken_rank, world_size, plan)
    outputs = end(processes, broken_rank, kind)
    said = {rank: [json.loads(line) for line in out.splitlines()] for rank, (out, _) in outputs.items()}
    assert said[broken_rank], outputs[broken_rank][1]
    broken_at = said[broken_rank][0]["broken_at"]
    for rank in set(range(world_size)) - {broken_rank}:
        assert said[rank], outputs[rank][1]
        (last,) = said[rank]
        assert last["step"] == BROKEN_STEP
        assert f"rank {broken_rank}" in last["error"], last["error"]
        check_place(last["error"], BROKEN_STEP)
        assert last["at"] - broken_at < TIMEOUT_S + ROLL_CALL_S + slack_s()
        assert processes[rank].returncode == 1
        assert "PeerError" in outputs[rank][1]
    assert processes[broken_rank].returncode == (1 if kind == "raises" else -signal.SIGKILL)


def raise_in_the_hook(me):
    """An error in cortado's own hook is passed on at once, without waiting for the timeout."""
    import cortado
    import torch

    class Scaler:
        scale = 1.0

        def get_scale(self):
            if self.scale is None:
                raise ValueError("the scale is lost")
            return self.scale

    scaler = Scaler()
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    state = cortado.attach(model, "acp(rank=2, timeout_s=60)", grad_scaler=scaler, verbose=False)
    optimizer = make_optimizer(model)
    for step in range(3):
        if step == 2 and me.rank == 1:
            scaler.scale = None
        start = time.monotonic()
        try:
            loss_of(model, make_batch(me.rank, step)).backward()
        except (cortado.PeerError, ValueError) as error:
            first = type(error).__name__, str(error), time.monotonic() - start
            with pytest.raises(cortado.CortadoError, match="step 2"):
                state.state_dict()
            return first
        optimizer.step()
    return None


def test_an_error_in_the_hook_is_passed_on_at_once():
    from ranks import Pool

    pool = Pool(3)
    try:
        values = pool.run(raise_in_the_hook)
    finally:
        pool.close()
    assert values[1][0] == "ValueError"
    for rank in (0, 2):
        kind, text, seconds = values[rank]
        assert kind == "PeerError" and "rank 1: the scale is lost" in text, text
        check_place(text, 2)
        assert seconds < 5 + slack_s()


def drop_within_a_step(me, plan, wraps):
    """A layer raises in the backward pass, when messages are under way; that rank drops its model and goes on."""
    import gc
    import weakref

    import cortado
    import torch
    from cortado import attachment

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            if me.rank == 1 and step == 1:  # the first one is of a single bucket
                raise ValueError("out of something")
            return gradient

    net = make_net()
    net[0].register_forward_hook(lambda module, given, values: Fails.apply(values))
    if wraps:
        model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.002)
        cortado.attach(model, plan, timeout_s=60, verbose=False)
    else:
        model, reducer = net, cortado.Reducer(net, plan, timeout_s=60, verbose=False)
    start = time.monotonic()
    try:
        for step in range(2):
            loss_of(model, make_batch(me.rank, step)).backward()
            if not wraps:
                reducer.wait()
    except (cortado.PeerError, ValueError) as error:
        raised = type(error).__name__, str(error)
    last = weakref.ref(net[4].weight)
    net = model = reducer = None
    gc.collect()
    ((engine, memory),) = attachment._kept
    return *raised, time.monotonic() - start, bool(engine and memory), last() is None


@pytest.mark.parametrize("plan", ["none", "acp(rank=2)"])
@pytest.mark.parametrize("wraps", [True, False])
def test_a_model_dropped_within_a_step_ends_the_others_and_keeps_what_is_on_its_way(plan, wraps):
    from ranks import Pool

    pool = Pool(2)
    try:
        (kind, text, seconds, kept, gone), own = pool.run(drop_within_a_step, plan=plan, wraps=wraps)
    finally:
        pool.close()
    assert own[:2] == ("ValueError", "out of something") and own[3]
    assert kind == "PeerError" and "was dropped within a step" in text, text
    assert seconds < 5 + slack_s() and kept
    assert gone and own[4]  # no parameter stays


def fail_between_steps(me):
    """Replicas differ, which is found before anything of a step is sent."""
    import gc
    import weakref

    import cortado
    import torch
    from cortado import attachment

    net = make_net()
    model = torch.nn.parallel.DistributedDataParallel(net)
    cortado.attach(model, "acp(rank=2)", check_replicas=1, verbose=False)
    with torch.no_grad():
        net[0].bias += me.rank
    with pytest.raises(cortado.MismatchError):
        loss_of(model, make_batch(me.rank, 0)).backward()
    last = weakref.ref(net[4].weight)
    net = model = None
    gc.collect()
    return len(attachment._kept), last() is None


def test_nothing_stays_of_a_model_that_failed_between_steps():
    from ranks import Pool

    pool = Pool(2)
    try:
        assert pool.run(fail_between_steps) == [(0, True)] * 2
    finally:
        pool.close()


def fail_and_forget(me, wraps):
    """What is left of a training that failed in cortado's own code, once the program has let go of it."""
    import gc
    import weakref

    import cortado
    import torch

    class Scaler:
        def get_scale(self):
            raise ValueError("the scale is lost")

    class Anything:
        pass

    left, failed = [], []

    def train():
        net, local = make_net(), Anything()
        left.append(weakref.ref(local))
        if wraps:
            net = torch.nn.parallel.DistributedDataParallel(net)
            failed.append(cortado.attach(net, "acp(rank=2)", grad_scaler=Scaler(), verbose=False))
            left.append(weakref.ref(net))
        else:
            failed.append(cortado.Reducer(net, "acp(rank=2)", grad_scaler=Scaler(), verbose=False))
        optimizer = make_optimizer(net)
        left.append(weakref.ref(optimizer))
        loss_of(net, make_batch(me.rank, 0)).backward()

    with pytest.raises(ValueError, match="the scale is lost"):
        train()
    gc.collect()
    return [ref() is None for ref in left], type(failed[0]._failure).__name__, str(failed[0]._failure)


@pytest.mark.parametrize("wraps", [True, False])
def test_what_failed_keeps_no_frames(wraps):
    from ranks import Pool

    pool = Pool(1)
    try:
        ((left, kind, text),) = pool.run(fail_and_forget, wraps=wraps)
    finally:
        pool.close()
    assert all(left), left
    assert (kind, text) == ("ValueError", "the scale is lost")


def fail_beside_another_thread(me):
    """Rank 0 fails while its engine takes no call, as another thread is in it. Returns whether rank 1 hears of it."""
    import cortado
    import torch

    class Engine:
        def abandon(self, why):
            raise cortado.CortadoError("the engine is in save_state() on another thread")

    model = torch.nn.parallel.DistributedDataParallel(make_net())
    state = cortado.attach(model, "acp(rank=2)", verbose=False)
    if me.rank == 0:
        state._engine = Engine()
        state._fail(ValueError("out of luck"))
    deadline = time.monotonic() + 10
    while not state._group.peer_has_failed() and time.monotonic() < deadline:
        time.sleep(0.01)
    return state._group.peer_has_failed()


def test_peers_hear_of_a_failure_while_another_thread_is_in_the_engine():
    from ranks import Pool

    pool = Pool(2)
    try:
        assert pool.run(fail_beside_another_thread) == [True, True]
    finally:
        pool.close()


class InterruptedGroup:
    """A process group whose sums a Ctrl-C follows at once, before anybody has their handles."""

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        return getattr(self._group, name)

    def allreduce(self, *arguments):
        self._group.allreduce(*arguments)
        raise KeyboardInterrupt


def interrupt_behind_a_start(me):
    """Returns what the backward pass of rank 0 raises, and how many buckets are kept."""
    import cortado
    import torch
    from cortado import attachment

    model = torch.nn.parallel.DistributedDataParallel(make_net())
    state = cortado.attach(model, "none(timeout_s=20)", verbose=False)
    if me.rank == 0:
        state._group._group = InterruptedGroup(state._group._group)
    try:
        loss_of(model, make_batch(me.rank, 0)).backward()
    except BaseException as error:
        return type(error).__name__, [len(memory) for _, memory in attachment._kept]
    return None


def test_memory_of_a_collective_stays_where_ctrl_c_came_behind_its_start():
    from ranks import Pool

    pool = Pool(2)
    try:
        first, _ = pool.run(interrupt_behind_a_start)
    finally:
        pool.close()
    assert first == ("KeyboardInterrupt", [1])


def interrupt_while_waiting(me):
    """Ctrl-C on a rank that waits for another one."""
    import threading

    import cortado
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    cortado.attach(model, "acp(rank=2, timeout_s=60)", verbose=False)
    store = dist.distributed_c10d._get_default_store()
    if me.rank == 1:
        store.wait(["interrupted"], timedelta(seconds=60))  # the other waits and is interrupted
    else:
        threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        loss_of(model, make_batch(me.rank, 0)).backward()
    except BaseException as error:
        took_s = time.monotonic() - start
        store.set("interrupted", "")
        return type(error).__name__, str(error), took_s
    return None


def test_ctrl_c_in_a_wait_is_a_keyboard_interrupt():
    from ranks import Pool

    pool = Pool(2)
    try:
        (kind, _, seconds), _ = pool.run(interrupt_while_waiting)
    finally:
        pool.close()
    assert kind == "KeyboardInterrupt"
    assert seconds < 3.5 + slack_s()


def break_off_and_go_on(me):
    """A backward pass ends within a step, by an error of the program's own, and the old model stays somewhere."""
    import cortado
    import torch

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("broken off")

    old = torch.nn.parallel.DistributedDataParallel(make_net(), bucket_cap_mb=0.0001)
    state = cortado.attach(old, "auto(quality=safe, measure_s=0.2)", verbose=False)
    loss_of(old, make_batch(me.rank, 0)).backward()  # in one bucket
    old.module[0].register_forward_hook(lambda module, inputs, outputs: Broken.apply(outputs))
    with pytest.raises(ValueError, match="broken off"):
        loss_of(old, make_batch(me.rank, 0)).backward()
    new = torch.nn.parallel.DistributedDataParallel(make_net())
    cortado.attach(new, "auto(quality=safe, measure_s=0.2)", verbose=False)
    for step in range(3):
        loss_of(new, make_batch(me.rank, step)).backward()
    return state._step_begun, cortado.report(new).to_dict()["steps"]


def test_a_step_that_was_broken_off_is_in_nobodys_way():
    from ranks import Pool

    pool = Pool(2)
    try:
        assert pool.run(break_off_and_go_on) == [(True, 3)] * 2
    finally:
        pool.close()


def one_within_the_other(me, plans, own_group):
    """The error of the backward pass, in which the step of the inner model falls into that of the outer one."""
    import cortado
    import torch
    import torch.distributed as dist

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(24, 24), torch.nn.Linear(8, 8)

        def forward(self, x, inner):
            return self.last(inner(self.first(x)))

    torch.manual_seed(0)
    nets = [torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0001) for net in (Outer(), make_net())]
    groups = [None, dist.new_group() if own_group else None]
    for net, plan, group in zip(nets, plans, groups, strict=True):
        cortado.attach(net, plan, process_group=group, verbose=False)
    outer, inner = nets
    for step in range(3):  # in the first one there is one bucket
        try:
            outer(make_batch(me.rank, step)[0], inner).sum().backward()
        except cortado.CortadoError as error:
            return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    "plans, own_group, is_refused",
    [
        (["acp(rank=2)", "auto"], False, True),
        (["auto", "acp(rank=2)"], False, True),
        (["acp(rank=2)", "acp(rank=2)"], False, False),
        (["auto", "auto"], True, False),
    ],
)
def test_two_whose_collectives_would_meet_in_any_order_are_refused(plans, own_group, is_refused):
    from ranks import Pool

    pool = Pool(2)  # of its own: the step is broken off
    try:
        errors = pool.run(one_within_the_other, plans=plans, own_group=own_group)
    finally:
        pool.close()
    for error in errors:
        if not is_refused:
            assert error is None
            continue
        kind, text = error
        assert kind == "CortadoError" and "is in its step on the process group on which" in text, text
        assert "process_group=torch.distributed.new_group()" in text


def two_towers_alone(me):
    import cortado
    import torch

    nets = [torch.nn.parallel.DistributedDataParallel(make_net(seed)) for seed in range(2)]
    for net in nets:
        cortado.attach(net, "auto(quality=safe, measure_s=0.2)", verbose=False)
    for step in range(3):
        sum(loss_of(net, make_batch(me.rank, step)) for net in nets).backward()
    return [cortado.report(net).to_dict()["steps"] for net in nets]


def test_one_rank_alone_may_have_two_models_in_a_backward_pass():
    from ranks import Pool

    pool = Pool(1)
    try:
        assert pool.run(two_towers_alone) == [[3, 3]]
    finally:
        pool.close()
