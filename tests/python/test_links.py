# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Shaped links: the rate is the one asked for, and no namespace survives its owner."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

import links as shaped
from launch import WorkerFailed, run_workers
from links_guard import list_namespaces

TRAINING = Path(shaped.__file__).parent
PORT = 5201
TRANSFER_BYTES = 24_000_000  # two seconds at 100 Mb/s, of which a busy machine may take a quarter
TRANSFER = f"""
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server((os.environ["MASTER_ADDR"], {PORT})) as server:
        peer, _ = server.accept()
        start, got = None, 0
        while chunk := peer.recv(1 << 20):
            if start is None:
                start = time.perf_counter()  # what has come until now is not counted
            else:
                got += len(chunk)
        print(got * 8 / (time.perf_counter() - start))
else:
    for _ in range(100):
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], {PORT}))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    peer.sendall(bytes({TRANSFER_BYTES}))
    peer.close()
"""
OWNER = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what was started in the background
sys.path.insert(0, {str(TRAINING)!r})
from links import Links
with Links(2, "100mbit") as links:
    links.popen(1, ["sleep", "600"])
    print(links.prefix, flush=True)
    time.sleep(600)
"""


def wait_until(condition, patience_s: float = 30.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def owner():
    """A process that holds two namespaces, and their prefix."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    prefix = process.stdout.readline().strip()
    yield process, prefix
    process.kill()
    process.wait()
    process.stdout.close()


def transfer_bits_per_s(links, sender_rank: int = 1) -> float:
    argv = [sys.executable, "-c", TRANSFER]
    receiver = links.popen(0, argv, stdout=subprocess.PIPE, text=True)
    sender = links.popen(sender_rank, argv)
    output, _ = receiver.communicate(timeout=30)
    assert sender.wait(timeout=10) == 0
    return float(output)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="gives up capabilities of root")
def test_root_that_may_not_make_namespaces_is_told_why():
    """As in a container. The ranks run on the loopback interface then."""
    script = f"""
import sys
sys.path.insert(0, {str(TRAINING)!r})
from links import Links
with Links(2, "100mbit") as links:
    print(links.describe())
"""
    without = ["setpriv", "--bounding-set", "-net_admin,-sys_admin"]
    done = subprocess.run([*without, sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("loopback, NOT shaped (a shaped link can't be made here: ip netns add"), done.stderr
    assert "ermitted" in done.stdout


@pytest.mark.usefixtures("namespaces")
def test_throughput_is_the_rate_asked_for():
    with shaped.Links(2, "100mbit") as links:
        assert 0.85e8 < transfer_bits_per_s(links) < 1.0e8  # 95.6 % of the rate is left after the headers


@pytest.mark.usefixtures("namespaces")
def test_links_may_get_their_rate_later():
    with shaped.Links(2, "100mbit", shaped_later=True) as links:
        assert transfer_bits_per_s(links) > 5e8
        links.shape()
        assert 0.85e8 < transfer_bits_per_s(links) < 1.0e8


@pytest.mark.usefixtures("namespaces")
def test_machines_share_one_link_of_the_rate():
    with shaped.Links(4, "100mbit", machines=2) as links:
        rates = []
        for sender_rank in (1, 2):  # of the receiver's machine, of the other
            before, _ = links.sent_between_machines()
            bits_per_s = transfer_bits_per_s(links, sender_rank)
            between, _ = links.sent_between_machines()
            rates.append((bits_per_s, between - before))
    (within, none), (across, all_of_it) = rates
    assert within > 5e8 and none < 1e5
    assert 0.85e8 < across < 1.0e8 and TRANSFER_BYTES < all_of_it < 1.1 * TRANSFER_BYTES


def test_machines_have_equally_many_ranks():
    with pytest.raises(ValueError, match="3 ranks on 2 machines"):
        shaped.Links(3, "100mbit", machines=2)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_namespace_survives_a_killed_owner(owner, number):
    process, prefix = owner
    assert len(list_namespaces(prefix)) == 3  # two ranks and the bridge's
    process.send_signal(number)
    process.wait(timeout=10)
    assert wait_until(lambda: not list_namespaces(prefix))


@pytest.mark.usefixtures("namespaces")
def test_the_namespace_of_the_probe_goes_with_a_killed_owner():
    script = f"""
import sys, time
sys.path.insert(0, {str(TRAINING)!r})
import links
def hang(namespace, *_):
    print(namespace, flush=True)
    time.sleep(600)
links._shape = hang
links.why_not_shaped()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    probe = process.stdout.readline().strip()
    assert probe.endswith("probe") and list_namespaces(probe) == [probe]
    process.kill()
    process.wait()
    process.stdout.close()
    assert wait_until(lambda: not list_namespaces(probe))


@pytest.mark.usefixtures("namespaces")
def test_namespaces_go_when_the_owner_raises():
    with pytest.raises(KeyError), shaped.Links(2) as links:
        prefix = links.prefix
        raise KeyError
    assert not list_namespaces(prefix)


@pytest.mark.usefixtures("namespaces")
def test_stale_namespaces_go_at_the_next_start():
    name = f"{shaped.PREFIX}{os.getpid()}-1-0-r0"  # this pid, but started at another time
    subprocess.run(["ip", "netns", "add", name], check=True)
    with shaped.Links(1):
        assert not list_namespaces(name)


@pytest.mark.usefixtures("namespaces")
def test_a_living_owners_namespaces_stay(owner):
    _, prefix = owner
    shaped.delete_stale_namespaces()
    assert len(list_namespaces(prefix)) == 3


def test_a_failing_worker_ends_the_others_and_is_named(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('out of coffee')\ntime.sleep(600)\n"
    )
    start = time.monotonic()
    with (
        shaped.Links(3) as links,
        pytest.raises(WorkerFailed, match=r"rank 1: exit status 1\s+out of coffee"),
    ):
        run_workers(links, script, {}, lambda event: None)
    assert time.monotonic() - start < 20


def test_a_silent_worker_is_given_up(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with shaped.Links(2) as links, pytest.raises(WorkerFailed, match="said nothing for 1 s"):
        run_workers(links, script, {}, lambda event: None, idle_s=1)


def test_events_of_rank_0_arrive(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "config = json.loads(sys.argv[1])\n"
        "print(json.dumps({'rank': os.environ['RANK'], 'world': os.environ['WORLD_SIZE'], **config}))\n"
    )
    events = []
    with shaped.Links(2) as links:
        run_workers(links, script, {"answer": 42}, events.append)
    assert events == [{"rank": "0", "world": "2", "answer": 42}]


def test_without_root_the_ranks_run_on_loopback_and_that_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with shaped.Links(2, "100mbit") as links:
        assert links.describe().startswith("loopback, NOT shaped (network namespaces need root")
        assert links.environment(1)["GLOO_SOCKET_IFNAME"] == "lo"
        assert socket.gethostbyname(links.environment(1)["MASTER_ADDR"]) == "127.0.0.1"


def test_rates_that_cannot_be_are_refused_where_they_would_be_recorded(monkeypatch):
    assert shaped.why_rates_cannot_be(["unshaped"]) is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert shaped.why_rates_cannot_be(["unshaped"]) is None
    why = shaped.why_rates_cannot_be(["1gbit", "unshaped", "100mbit"])
    assert why == (
        "links of 1gbit, 100mbit can't be made here: network namespaces need root; "
        "run it as root, or with --rates unshaped"
    )


def can_give_up_root():
    command = ["setpriv", "--bounding-set", "-net_admin,-sys_admin", "true"]
    return (
        os.geteuid() == 0 and shutil.which("setpriv") and subprocess.run(command, capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_give_up_root(), reason="gives up root")
@pytest.mark.parametrize("program", ["auto.py", "speed.py", "first_order.py", "second_order.py"])
def test_programs_that_record_refuse_a_rate_without_root(program, tmp_path):
    without = ["setpriv", "--bounding-set", "-net_admin,-sys_admin"]
    asked = ["--studies", "rank"] if program == "first_order.py" else ["--rates", "1gbit"]
    command = [*without, sys.executable, str(TRAINING / program), *asked, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "links of 1gbit can't be made here" in done.stderr, done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("rate", ["", "fast", "100", "0mbit", "-1gbit"])
def test_a_bad_rate_is_refused(rate):
    with pytest.raises(ValueError, match="expected for example 100mbit"):
        shaped.Links(2, rate)


@pytest.mark.parametrize(
    ("rate", "bits_per_s"), [("200mbit", 2e8), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("unshaped", None)]
)
def test_rates(rate, bits_per_s):
    assert shaped.parse_rate_bits_per_s(rate) == bits_per_s
