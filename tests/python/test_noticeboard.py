# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What a rank tells the others over a store that is slow, and what stays of the thread that asks it."""

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch.distributed as dist
from cortado import noticeboard
from cortado.noticeboard import Noticeboard


class SlowOnce:
    """A store whose first ``set`` takes its time."""

    def __init__(self, store, slow_s=0.0):
        self._store, self._slow_s = store, slow_s
        self.entered, self.released = threading.Event(), threading.Event()

    def set(self, key, value):
        slow_s, self._slow_s = self._slow_s, 0.0
        self.entered.set()
        self.released.wait(slow_s)
        self._store.set(key, value)

    def get(self, key):
        return self._store.get(key)

    def check(self, keys):
        return self._store.check(keys)


@pytest.fixture
def boards(monkeypatch):
    """make(rank, slow_s): its board over one store."""
    store = dist.HashStore()
    monkeypatch.setattr(noticeboard, "_STORE_S", 10.0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def make(rank, slow_s=0.0):
        board = Noticeboard("test", rank, 2)
        board._store._store = SlowOnce(board._store._store, slow_s)
        return board

    return make


def wait_until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_peers_hear_of_a_failure_that_the_store_was_slow_to_take(boards, monkeypatch):
    monkeypatch.setattr(noticeboard, "_STORE_S", 0.3)
    failed, peer = boards(0, slow_s=4.0), boards(1)
    start = time.monotonic()
    failed.announce("out of coffee")
    assert time.monotonic() - start < 3.5  # it gives up waiting
    monkeypatch.setattr(noticeboard, "_STORE_S", 10.0)
    wait_until(peer.somebody_failed)
    assert peer.roll_call() == "every rank answered: rank 0: out of coffee"
    failed.announce("out of tea")
    assert peer.roll_call() == "every rank answered: rank 0: out of coffee"


def test_a_failure_may_name_a_path_that_is_no_text(boards):
    failed, peer = boards(0), boards(1)
    failed.announce("can't read caf\udce9.json")
    assert peer.roll_call() == "every rank answered: rank 0: can't read caf\\udce9.json"


def test_peers_hear_of_a_failure_whose_announcement_is_interrupted(boards, monkeypatch):
    monkeypatch.setattr(noticeboard, "_STORE_S", 30.0)
    failed, peer = boards(0, slow_s=60.0), boards(1)
    slow = failed._store._store

    def interrupt():
        slow.entered.wait()
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            failed.announce("out of coffee")
    finally:
        thread.join()
        slow.released.set()
        signal.signal(signal.SIGINT, before)
    assert failed.somebody_failed()  # the answer to this call, not to the one that was given up
    assert peer.roll_call() == "every rank answered: rank 0: out of coffee"


def test_the_thread_ends_with_its_board_and_keeps_no_store(boards):
    board = boards(0)
    assert not board.somebody_failed()
    thread, store = board._store._thread, weakref.ref(board._store._store)
    assert thread.is_alive()
    del board
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert store() is None


def test_between_calls_the_thread_keeps_no_store(boards):
    board = boards(0)
    board.announce("out of coffee")
    store = weakref.ref(board._store._store)
    board._store._store = None
    wait_until(lambda: store() is None)
    assert board._store._thread.is_alive()
