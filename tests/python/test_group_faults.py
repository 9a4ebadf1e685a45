# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Every kind of collective over Gloo when one rank does not come, gives up or dies: the others get an error that names
it, in time."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from test_ddp_faults import free_port
from test_group import FLOAT32, KINDS, Collective

BROKEN = 2  # the rank; root of broadcasts, so that the others need it in every kind
ROLL_CALL_S = 5
SLACK_S = 5 + 10 * (os.getloadavg()[0] / os.cpu_count() > 1.5)


# ---- in a rank -------------------------------------------------------------------------------------------------------


def exchange(group, kind, wait_s):
    """The collective, then a sum: who only sends may end the first one well."""
    root = BROKEN if kind == "broadcast" else 0
    collective = Collective(kind, FLOAT32, root, 1000, False, group.rank, group.world_size)
    group.start(0, *collective.arguments)
    group.wait(0, wait_s)
    collective.check()
    values = np.ones(10, dtype=np.float32)
    group.start(1, "all_reduce", FLOAT32, values.ctypes.data, values.ctypes.data, 10, 0, None, None)
    group.wait(1, wait_s)


def fails_to_come(me, kind, late_s, wait_s):
    """The broken rank says after ``late_s`` that it has given up; the others return their error and its time."""
    import torch.distributed as dist
    from cortado.group import TorchGroup

    group = TorchGroup(dist.new_group(list(range(me.world_size))))
    group.set_timeout(wait_s)
    if me.rank == BROKEN:
        time.sleep(late_s)
        group.announce("out of coffee")
        return None
    begin = time.monotonic()
    try:
        exchange(group, kind, wait_s)
    except (RuntimeError, TimeoutError) as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("no error")


def dies(kind, rank, world_size, port):
    import torch.distributed as dist
    from cortado.group import TorchGroup

    faulthandler.dump_traceback_later(45, exit=True)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    group = TorchGroup(None)
    group.set_timeout(20)
    group.all_gather(b"ready", 20)
    if rank == BROKEN:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        exchange(group, kind, 20.0)
    except (RuntimeError, TimeoutError) as error:
        print(json.dumps({"error": str(error), "seconds": time.monotonic() - begin}), flush=True)
    store = dist.distributed_c10d._get_default_store()  # in rank 0, which may not end before the other has answered
    store.set(f"answered/{rank}", "")
    store.wait(["answered/0", "answered/1"])
    os._exit(0)  # with works in flight that will never end


FEW_KINDS_FIRST = [
    kind if kind in ("all_reduce", "all_to_all", "broadcast") else pytest.param(kind, marks=pytest.mark.slow)
    for kind in KINDS
]


# ---- in pytest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEW_KINDS_FIRST)
@pytest.mark.parametrize("fault, late_s, wait_s", [("gives up", 0.2, 30.0), ("is late", 2.5, 1.0)])
def test_the_others_get_an_error_in_time(pools, kind, fault, late_s, wait_s):
    answers = pools(3).run(fails_to_come, kind=kind, late_s=late_s, wait_s=wait_s)
    for message, seconds in answers[:BROKEN]:
        assert "rank 2: out of coffee" in message
        assert seconds < 2 + ROLL_CALL_S + SLACK_S


@pytest.mark.parametrize("kind", FEW_KINDS_FIRST)
def test_a_dead_rank_is_named(kind):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps([kind, rank, 3, port])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in range(BROKEN):
        out, err = outputs[rank]
        assert out, err[-2000:]
        answer = json.loads(out)
        assert "rank 2 did not answer" in answer["error"]
        assert answer["seconds"] < 2 + ROLL_CALL_S + SLACK_S


if __name__ == "__main__":
    dies(*json.loads(sys.argv[1]))
