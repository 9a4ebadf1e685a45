# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What runs without the GIL is not touched by another thread meanwhile, which gets an error; the same thread may."""

import ctypes
import threading

import cortado
import numpy as np
import pytest
from cortado import _core

FLOAT32 = 0
ELEMS = 4096


class Mirror:
    """A group of two ranks whose other one does what this one does. ``in_wait`` is called as the engine waits."""

    world_size = 2

    def __init__(self):
        self.in_wait = lambda: None

    def all_gather(self, sent, timeout_s):
        return sent * 2

    def start(self, work, kind, dtype, sent, received, elems, root, counts, received_counts):
        assert kind in ("all_gather", "all_reduce")
        own = ctypes.string_at(sent, elems * {0: 4, 1: 2, 2: 2, 3: 1}[dtype])
        if kind == "all_gather":
            ctypes.memmove(received, own * 2, 2 * len(own))
        else:
            assert dtype == FLOAT32
            total = (2 * np.frombuffer(own, dtype=np.float32)).tobytes()
            ctypes.memmove(received, total, len(total))

    def test(self, work):
        return False

    def wait(self, work, timeout_s):
        self.in_wait()


def start_step(what):
    mirror = Mirror()
    engine = _core.Engine([("w", FLOAT32, 64, 64, 2, False)], what, mirror, 0, 2, "mirror")
    gradient = np.ones(ELEMS, dtype=np.float32)
    place = _core.BucketMap([0], [0])
    engine.begin_step()
    engine.submit(place, gradient.ctypes.data)
    return mirror, engine, place, gradient


def in_a_thread(mirror, call):
    """Runs ``call`` there up to its first wait. What is returned lets it go on, and returns what it raised."""
    waits, goes_on, raised = threading.Event(), threading.Event(), []

    def in_wait():
        waits.set()
        assert goes_on.wait(30)

    def run():
        try:
            call()
        except Exception as error:
            raised.append(error)

    mirror.in_wait = in_wait
    thread = threading.Thread(target=run)
    thread.start()
    assert waits.wait(30)

    def end():
        goes_on.set()
        thread.join(30)
        return raised

    return end


def calls_of(engine, place, gradient):
    return {
        "report": engine.report,
        "take_news": engine.take_news,
        "describe": engine.describe,
        "spec": lambda: engine.spec,
        "timeout_s": lambda: engine.timeout_s,
        "save_state": engine.save_state,
        "start_trace": lambda: engine.start_trace(10),
        "submit": lambda: engine.submit(place, gradient.ctypes.data),
        "begin_step": engine.begin_step,
        "finish_step": engine.finish_step,
        "abandon": lambda: engine.abandon("enough"),
    }


def test_another_thread_gets_an_error_while_the_engine_is_in_a_step():
    mirror, engine, place, gradient = start_step("topk(density=0.1, min_elems=0)")
    end = in_a_thread(mirror, engine.finish_step)
    try:
        for name, call in calls_of(engine, place, gradient).items():
            with pytest.raises(cortado.CortadoError, match=r"the engine is in finish_step\(\) on another thread"):
                call()
                pytest.fail(f"{name} was let in")
    finally:
        assert end() == []
    assert engine.report()["steps"] == 1
    assert engine.save_state()["step"] == 1


def test_the_thread_itself_may_ask_while_it_waits():
    mirror, engine, *_ = start_step("topk(density=0.1, min_elems=0)")
    reports = []
    mirror.in_wait = lambda: reports.append(engine.report())
    engine.finish_step()
    assert reports
    assert engine.report()["steps"] == 1


def test_the_decision_of_auto_is_not_read_by_another_thread_within_a_step():
    mirror, engine, *_ = start_step("auto")
    end = in_a_thread(mirror, engine.finish_step)
    try:
        with pytest.raises(cortado.CortadoError, match="on another thread"):
            engine.decision()
    finally:
        assert end() == []
    assert engine.decision()["decided"] is False


KFAC_OPTIONS = {
    "strategy": "COMM-OPT",
    "workers": 2,
    "is_eigen": True,
    "pi_correction": False,
    "colocate_factors": True,
    "balance_memory": False,
    "compression": "none",
    "use_error_feedback": False,
    "aggregate": 0,
    "random_seed": 0,
    "factor_compression": "none",
    "schedule": "factors 1, inverses 1",
    "timeout_s": 30.0,
    "checks_collectives": False,
    "threads": 1,
}


def test_kfac_takes_one_thread_at_a_time():
    mirror = Mirror()
    kfac = _core.Kfac([("fc", 8, 8, False, 1, None)], KFAC_OPTIONS, mirror, 0, 2, "mirror")
    gradient = np.ones(64, dtype=np.float32)
    end = in_a_thread(mirror, lambda: kfac.reduce_gradients([(gradient.ctypes.data, 0, FLOAT32)]))
    calls = {
        "report": kfac.report,
        "memory": kfac.memory,
        "save_state": kfac.save_state,
        "steps": lambda: kfac.steps,
        "placements": lambda: kfac.placements,
        "wants_batches": lambda: kfac.wants_batches(0),
        "reset_batch": kfac.reset_batch,
        "set_compression": lambda: kfac.set_compression("none"),
    }
    try:
        for name, call in calls.items():
            with pytest.raises(cortado.CortadoError, match=r"the KFAC is in reduce_gradients\(\) on another thread"):
                call()
                pytest.fail(f"{name} was let in")
    finally:
        assert end() == []
    assert kfac.steps == 0


def test_a_gather_takes_one_thread_at_a_time():
    mirror = Mirror()
    tensors = [("a", FLOAT32, 64, 64, 0), ("b", FLOAT32, 64, 64, 1)]
    gather = _core.OwnerGather(tensors, "none", False, 0, 0, 30.0, mirror, 0, 2, "mirror", False)
    values = [np.ones(ELEMS, dtype=np.float32) for _ in tensors]
    end = in_a_thread(mirror, lambda: gather.run(0, [each.ctypes.data for each in values]))
    try:
        for call in (gather.report, gather.save_residuals, lambda: gather.set_codec("none")):
            with pytest.raises(cortado.CortadoError, match=r"the gather is in run\(\) on another thread"):
                call()
    finally:
        end()  # what came is of the wrong rank
    gather.report()
