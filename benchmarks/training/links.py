# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Real, shaped links on one machine: every rank in its own network namespace.

    python benchmarks/training/links.py --ranks 4 --rate 100mbit -- python train.py

Each rank has an `eth0` (a veth) that ends in a bridge in one more namespace; htb limits both ends, so
sending and receiving are both held to the rate, by real sockets under real congestion control. The
command finds RANK, WORLD_SIZE, MASTER_ADDR and so on in its environment, as under torchrun.

With `--machines M` the ranks are dealt out to M machines, neighbours together: those of a machine share
an unshaped bridge, and each machine has one link of the rate to the others.

Nothing is left behind: a guard process (`links_guard.py`) deletes the namespaces when the owner
closes them, raises, or is killed, even by SIGKILL; namespaces of owners that died together with
their guard are deleted at the next start.

Without root, or where a container forbids it, the ranks run on the loopback interface, unshaped;
`Links.describe()` says so. Programs that record measurements refuse rates there (`why_rates_cannot_be`).
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from links_guard import delete_namespaces, ip, list_namespaces

PREFIX = "cortado-"
UNSHAPED = "unshaped"
LOOPBACK = "loopback"  # how a description begins where there are no namespaces
UPLINK = "uplink"  # of a machine
CONGESTION_CONTROL = "cubic"
FIFO_S = 0.05  # depth of the queue in front of the shaped link
_serial = itertools.count()


def parse_rate_bits_per_s(rate: str) -> int | None:
    """`100mbit` -> 100000000; `unshaped` -> None."""
    if rate == UNSHAPED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not match or float(match[1]) <= 0:
        raise ValueError(f"rate {rate!r}: expected for example 100mbit, 1gbit or {UNSHAPED}")
    return int(float(match[1]) * {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}[match[2]])


def htb_burst_bytes(bits_per_s: int) -> int:
    """As small as keeps htb accurate at the rate: what may pass unshaped after an idle gap.

    tbf would need 128 KB already at 1 Gb/s, or cut every large packet in software; htb does not.
    """
    for limit_bits_per_s, burst_bytes in ((200e6, 1600), (1e9, 8192), (2.5e9, 32768)):
        if bits_per_s <= limit_bits_per_s:
            return burst_bytes
    return 131072


def why_not_shaped() -> str | None:
    """None where namespaces can be made, otherwise the reason why not."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return _why_no_link_was_made()


@functools.cache
def _why_no_link_was_made() -> str | None:
    """Root alone is not enough: in a container it may lack the capabilities, and a kernel may have no htb. So this
    makes a namespace with a shaped link, and deletes it."""
    probe = f"{_own_prefix()}probe"
    guard = None
    try:
        guard = _start_guard(probe)  # before there is anything that could be left behind
        _add_bridge(probe)
        _ip("-n", probe, "link", "add", "eth0", "type", "veth", "peer", "name", "port0")
        _shape(probe, "eth0", 10**9)
    except RuntimeError as error:
        return f"a shaped link can't be made here: {error}"
    finally:
        _end_guard(guard)
        delete_namespaces(probe)
    return None


def why_rates_cannot_be(rates: list[str], instead: str = f"--rates {UNSHAPED}") -> str | None:
    """Why these rates can't be measured here: over the loopback a record would bear the name of a rate that it never
    had. None where they can. `instead`: what to ask for."""
    shaped = [rate for rate in rates if parse_rate_bits_per_s(rate) is not None]
    if not shaped or (why := why_not_shaped()) is None:
        return None
    return f"links of {', '.join(shaped)} can't be made here: {why}; run it as root, or with {instead}"


def is_namespaced(record: dict) -> bool:
    """Whether the links of a record were network namespaces, by their description."""
    return not record["links"].startswith(LOOPBACK)


class Links:
    """`ranks` places to run a process in, joined by links of `rate`. A context manager.

    With `machines` the links of `rate` are those between machines, one for each. With `shaped_later` all links are
    unshaped until `shape()`.

    Use it from the main thread: a process started by `popen` is killed when the thread that
    started it ends.
    """

    def __init__(self, ranks: int, rate: str = UNSHAPED, machines: int | None = None, *, shaped_later: bool = False):
        if machines is not None and (machines < 2 or ranks % machines):
            raise ValueError(f"{ranks} ranks on {machines} machines: expected 2 or more, with equally many ranks each")
        self.ranks = ranks
        self.machines = machines
        self.rate = rate
        self.bits_per_s = parse_rate_bits_per_s(rate)
        self._shaped_later = shaped_later
        self.why_loopback = why_not_shaped()
        self.prefix = _own_prefix()
        self._guard = None
        self._port = 29500

    @property
    def namespaced(self) -> bool:
        return self.why_loopback is None

    @property
    def interface(self) -> str:
        return "eth0" if self.namespaced else "lo"

    def describe(self) -> str:
        if not self.namespaced:
            asked = "" if self.bits_per_s is None else f"; {self.rate} was asked for"
            return f"{LOOPBACK}, NOT shaped ({self.why_loopback}{asked})"
        speed = (
            "unshaped"
            if self.bits_per_s is None
            else f"{self.rate} each way (htb, burst {htb_burst_bytes(self.bits_per_s)} B)"
        )
        if self.machines is not None:
            speed = f"{self.machines} machines of unshaped links, the link of each to the others {speed}"
        return f"one network namespace a worker, {speed}, TCP {CONGESTION_CONTROL}"

    def namespace(self, rank: int) -> str:
        return f"{self.prefix}r{rank}"

    @property
    def _hub(self) -> str:
        return f"{self.prefix}hub"

    def _bridge_of(self, rank: int) -> str:
        """The namespace of the bridge that a rank is plugged into."""
        return self._hub if self.machines is None else self._machine(rank // (self.ranks // self.machines))

    def _machine(self, machine: int) -> str:
        return f"{self.prefix}m{machine}"

    def sent_between_machines(self) -> tuple[int, int]:
        """Bytes and packets that all machines have sent to others so far. A packet may be as large as 64 KB: the
        kernel cuts it later, or never."""
        total_bytes = total_packets = 0
        for machine in range(self.machines or 0):
            shown = _ip("-n", self._machine(machine), "-s", "-j", "link", "show", "dev", UPLINK)
            sent = json.loads(shown)[0]["stats64"]["tx"]
            total_bytes, total_packets = total_bytes + sent["bytes"], total_packets + sent["packets"]
        return total_bytes, total_packets

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}" if self.namespaced else "127.0.0.1"

    def environment(self, rank: int) -> dict[str, str]:
        """What torch.distributed's `env://` rendezvous and Gloo read."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": self.interface,
        }

    def popen(self, rank: int, argv: list[str], env=None, **options) -> subprocess.Popen:
        """Starts `argv` as rank `rank`; it cannot outlive this process."""
        command = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        if self.namespaced:
            command += ["ip", "netns", "exec", self.namespace(rank)]
        environment = {**os.environ, **self.environment(rank), **(env or {})}
        return subprocess.Popen([*command, *argv], env=environment, **options)

    def cut(self, rank: int) -> None:
        """Takes the cable out: nothing reaches the rank any more, and nothing tells it so."""
        self._set_cable(rank, "down")

    def mend(self, rank: int) -> None:
        """Puts the cable back."""
        self._set_cable(rank, "up")

    def _set_cable(self, rank: int, state: str) -> None:
        _ip("-n", self._bridge_of(rank), "link", "set", f"port{rank}", state)

    def __enter__(self) -> "Links":
        if not self.namespaced:
            self._port = _free_port()
            return self
        delete_stale_namespaces()
        self._guard = _start_guard(self.prefix)
        try:
            self._make_namespaces()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs inside and deletes the namespaces. May be called twice."""
        if self._guard is None:
            return
        guard, self._guard = self._guard, None
        _end_guard(guard)
        left = delete_namespaces(self.prefix)  # normally nothing: unless the guard was killed
        if left:
            raise RuntimeError(f"could not delete the network namespaces {', '.join(left)}")

    def _make_namespaces(self) -> None:
        _add_bridge(self._hub)
        for machine in range(self.machines or 0):
            self._add_machine(machine)
        for rank in range(self.ranks):
            self._add_rank(rank)
        if not self._shaped_later:
            self.shape()

    def shape(self) -> None:
        """Gives the links their rate, once."""
        if self.bits_per_s is None or not self.namespaced:
            return
        if self.machines is None:
            ends = [(self.namespace(rank), "eth0", self._hub, f"port{rank}") for rank in range(self.ranks)]
        else:
            ends = [(self._machine(m), UPLINK, self._hub, f"machine{m}") for m in range(self.machines)]
        for namespace, device, hub, port in ends:
            _shape(namespace, device, self.bits_per_s)
            _shape(hub, port, self.bits_per_s)

    def _add_machine(self, machine: int) -> None:
        name, port = self._machine(machine), f"machine{machine}"
        _add_bridge(name)
        _ip("-n", name, "link", "add", UPLINK, "type", "veth", "peer", "name", port, "netns", self._hub)
        _ip("-n", name, "link", "set", UPLINK, "master", "br0", "up")
        _ip("-n", self._hub, "link", "set", port, "master", "br0", "up")

    def _add_rank(self, rank: int) -> None:
        name, port, hub = self.namespace(rank), f"port{rank}", self._bridge_of(rank)
        _ip("netns", "add", name)
        _set_in_kernel(name, "net/ipv6/conf/all/disable_ipv6")
        _set_in_kernel(name, "net/ipv4/tcp_no_metrics_save")
        peer = ["peer", "name", port, "netns", hub]
        mac = ["address", _mac(rank)]
        _ip("-n", name, "link", "add", "eth0", *mac, "type", "veth", *peer)
        _ip("-n", name, "address", "add", f"{self.address(rank)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", hub, "link", "set", port, "master", "br0", "up")
        for other in range(self.ranks):  # static, so that ARP is no part of a measurement
            if other != rank:
                entry = [self.address(other), "lladdr", _mac(other), "nud", "permanent"]
                _ip("-n", name, "neighbour", "add", *entry, "dev", "eth0")
        # On the route, since a namespace may not set its own default: the host's would hold.
        route = ["10.77.0.0/24", "dev", "eth0", "src", self.address(rank)]
        _ip("-n", name, "route", "change", *route, "congctl", CONGESTION_CONTROL)


def _start_guard(prefix: str) -> subprocess.Popen:
    """The process that deletes namespaces of this prefix once this one has ended it or is gone."""
    script = Path(__file__).with_name("links_guard.py")
    guard = subprocess.Popen(
        [sys.executable, "-S", "-E", str(script), prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    if guard.stdout.readline() != b"ready\n":
        _end_guard(guard)
        raise RuntimeError("the process that guards the network namespaces did not start")
    return guard


def _end_guard(guard: subprocess.Popen | None) -> None:
    if guard is None:
        return
    with contextlib.suppress(BrokenPipeError):
        guard.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(timeout=20)
    guard.stdout.close()


def delete_stale_namespaces() -> None:
    """Deletes namespaces whose owner no longer runs (it and its guard were killed together)."""
    for name in list_namespaces(PREFIX):
        match = re.match(rf"{PREFIX}(\d+)-(\d+)-", name)
        if match and _start_ticks(int(match[1])) != match[2]:
            delete_namespaces(match[0])


def _own_prefix() -> str:
    """Of namespaces of this process; each time another one."""
    return f"{PREFIX}{os.getpid()}-{_start_ticks(os.getpid())}-{next(_serial)}-"


def _start_ticks(pid: int) -> str:
    """Start time of a process in clock ticks; tells it from a later one with the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"


def _ip(*arguments: str) -> str:
    done = ip(*arguments)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _add_bridge(namespace: str) -> None:
    """In a namespace of its own."""
    _ip("netns", "add", namespace)
    _set_in_kernel(namespace, "net/ipv6/conf/all/disable_ipv6")
    _ip("-n", namespace, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
    _ip("-n", namespace, "link", "set", "br0", "up")


def _set_in_kernel(namespace: str, setting: str) -> None:
    """To 1, where the kernel has the setting."""
    file = f"/proc/sys/{setting}"
    _ip("netns", "exec", namespace, "sh", "-c", f"[ ! -e {file} ] || echo 1 >{file}")


def _shape(namespace: str, device: str, bits_per_s: int) -> None:
    """Limits what `device` sends. htb: accurate to 0.5 % with a burst of one packet."""
    burst = str(htb_burst_bytes(bits_per_s))
    rate = f"{bits_per_s}bit"
    fifo_bytes = str(max(65536, int(bits_per_s / 8 * FIFO_S)))
    htb = ["htb", "rate", rate, "ceil", rate, "burst", burst, "cburst", burst, "quantum", "60000"]
    for command in (
        ["qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1"],
        ["class", "add", "dev", device, "parent", "1:", "classid", "1:1", *htb],
        ["qdisc", "add", "dev", device, "parent", "1:1", "bfifo", "limit", fifo_bytes],
    ):
        _ip("netns", "exec", namespace, "tc", *command)


def _mac(rank: int) -> str:
    return f"02:c0:de:00:00:{rank + 1:02x}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="run a command on every rank over shaped links")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default=UNSHAPED, help="100mbit, 200mbit, 1gbit, unshaped")
    parser.add_argument("--machines", type=int, help="the rate is that of each machine's link; default: of each rank's")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    arguments = parser.parse_args()
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if not command:
        parser.error("no command given; it follows after --")
    from launch import run_ranks  # here, because launch.py imports this file

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Links(arguments.ranks, arguments.rate, arguments.machines) as links:
        print(f"links: {links.describe()}", file=sys.stderr)
        return run_ranks(links, command)


if __name__ == "__main__":
    sys.exit(main())
