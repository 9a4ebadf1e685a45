# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Worker processes for tests of several ranks, kept alive between tests.

    def scenario(me, steps):            # me: Rank
        model = me.attach(net, "acp")   # every model wrapped through `me` must end bit-identical on all ranks
        ...
        return something

    values = Pool(3).run(scenario, steps=5)   # one value a rank

The ranks share a Gloo group over loopback. They are forked from one server process that has imported torch already.
A scenario that raises, hangs or kills a rank ends its pool, so that the next test gets a new one.

For ranks that end by themselves, as programs do, there is Program:

    ranks = [Program(main, rank, 3) for rank in range(3)]
"""

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

WORLD_SIZES = (1, 2, 3, 5)
_PRELOAD = ["numpy", "pytest", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim", "cortado"]
_GRACE_S = 10.0  # for the other ranks, once one has failed


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the text holds the traceback of each that did."""


# ---- in a rank -------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What a scenario knows of itself."""

    rank: int
    world_size: int
    _models: list = field(default_factory=list)

    def wrap(self, net, **options):
        """A DistributedDataParallel of ``net`` whose replicas are compared when the scenario ends."""
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(net, **options)
        self._models.append(model)
        return model

    def attach(self, net, plan, *, grad_scaler=None, **options):
        """Like wrap(), attached to ``plan`` unless that is None."""
        import cortado

        model = self.wrap(net, **options)
        if plan is not None:
            model.cortado = cortado.attach(model, plan, grad_scaler=grad_scaler, verbose=False)
        return model

    def assert_replicas_are_identical(self):
        for number, model in enumerate(self._models):
            digests = self.gather(fingerprint(model))
            assert len(set(digests)) == 1, f"replicas of model {number} differ between ranks: {digests}"

    def gather(self, value):
        """Every rank's value, in rank order."""
        import torch.distributed as dist

        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def fingerprint(module):
    """A hash of the bits of all parameters and their names."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _serve(rank, world_size, connection, stacks):
    """Joins the group and answers jobs until the connection closes."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported before the fork is not looked at again
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w"), all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        connection.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", connection.recv(), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    while True:
        try:
            module, name, kwargs = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send_bytes(_answer(Rank(rank, world_size), module, name, kwargs))
        gc.collect()


def _run_program(module, name, arguments, environment, namespace, stdin, stdout, stderr):
    """In the process of a Program."""
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    with open(stderr, "w") as file:
        os.dup2(file.fileno(), 2)
    stdin.close()
    stdout.close()
    sys.stdin = open(0, closefd=False)
    os.environ.update(environment)
    code = None
    try:
        if namespace is not None:
            _enter_namespace(namespace)
        getattr(importlib.import_module(module), name)(*arguments)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        traceback.print_exc()
        code = 1
        # As the interpreter does: what its frames hold is destroyed when that ends.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    ctypes.pythonapi.Py_Exit(
        code if isinstance(code, int) else code is not None
    )  # multiprocessing would leave out the destructors of what is still there


def _enter_namespace(name):
    with Path(f"/run/netns/{name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def _answer(me, module, name, kwargs):
    try:
        value = getattr(importlib.import_module(module), name)(me, **kwargs)
        me.assert_replicas_are_identical()
        return pickle.dumps((value, None))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))


# ---- in pytest -------------------------------------------------------------------------------------------------------


def free_port():
    """A port below those that the kernel gives to whoever asks for any (ip_local_port_range), so it stays free."""
    while True:
        with socket.socket() as server, contextlib.suppress(OSError):
            port = random.randrange(20000, 32768)
            server.bind(("127.0.0.1", port))
            return port


def slack_s():
    """By how much what takes some seconds may take longer, as busy as the machine is now."""
    return 5 + 10 * (os.getloadavg()[0] / os.cpu_count() > 1.5)


def _server():
    """Forks processes in which _PRELOAD is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


class Program:
    """``function(*arguments)`` in a process that ends as a program does: what is still there is destroyed, an error
    printed, sys.exit() obeyed. ``stdin`` and ``stdout`` are pipes of text.

    It is forked, because an import of torch takes seconds, and more where every core is busy; so ``environment`` comes
    behind that import. ``namespace``: the network namespace it runs in.
    """

    def __init__(self, function, *arguments, environment=None, namespace=None):
        context = _server()
        self._stderr = tempfile.NamedTemporaryFile("r+", prefix="cortado-stderr-")
        (stdin, to_it), (from_it, stdout) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        told = (function.__module__, function.__name__, arguments, environment or {"GLOO_SOCKET_IFNAME": "lo"})
        told += (namespace, stdin, stdout, self._stderr.name)
        self._process = context.Process(target=_run_program, args=told, daemon=True)
        self._process.start()
        stdin.close()
        stdout.close()
        self.stdin, self.stdout = open(os.dup(to_it.fileno()), "w"), open(os.dup(from_it.fileno()))
        to_it.close()
        from_it.close()

    @property
    def returncode(self):
        """As of a subprocess.Popen: None while it runs, -N where signal N has ended it."""
        return self._process.exitcode

    def hear(self):
        """The next line of its stdout, which is JSON. Where there is none, an error with what is in stderr."""
        line = self.stdout.readline()
        assert line, self.communicate()[1]
        return json.loads(line)

    def communicate(self, text=""):
        """Writes ``text``, waits for its end, and returns what it has written to stdout since, and to stderr."""
        with contextlib.suppress(BrokenPipeError), self.stdin:
            self.stdin.write(text)
        said = self.stdout.read()
        self._process.join()
        return said, self._stderr.read()

    def kill(self):
        """Ends it, if it has not ended, and waits for that."""
        self._process.kill()
        self._process.join()


class Pool:
    """``world_size`` ranks; run() calls a function on all of them."""

    def __init__(self, world_size):
        self._context = _server()
        self._folder = tempfile.TemporaryDirectory(prefix="cortado-ranks-")
        self.processes, self._connections = [], []
        for rank in range(world_size):
            ours, theirs = self._context.Pipe()
            arguments = (rank, world_size, theirs, self._stacks(rank))
            self.processes.append(self._context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._connections.append(ours)
        port = self._connections[0].recv()
        for connection in self._connections[1:]:
            connection.send(port)

    @property
    def is_open(self):
        return bool(self._connections)

    def run(self, function, *, timeout_s=240.0, **kwargs):
        """Calls ``function(me, **kwargs)`` on every rank; returns their values, or raises RanksFailed and closes."""
        for connection in self._connections:
            connection.send((function.__module__, function.__name__, kwargs))
        values, failures = self._collect(timeout_s)
        if not failures:
            return [values[rank] for rank in range(len(self.processes))]
        self.close()
        text = "\n".join(f"---- rank {rank}: {failures[rank]}" for rank in sorted(failures))
        raise RanksFailed(f"{function.__name__}({kwargs}) failed on {len(failures)} ranks\n{text}")

    def _collect(self, timeout_s):
        values, failures = {}, {}
        waiting = dict(enumerate(self._connections))
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(waiting.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                value, error = self._receive(rank)
                del waiting[rank]
                if error is None:
                    values[rank] = value
                else:
                    failures[rank] = error
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank in waiting:
            failures[rank] = f"no answer; it stood at\n{self._stack_of(rank)}"
        return values, failures

    def _receive(self, rank):
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join(1.0)
            return None, f"ended with exit code {self.processes[rank].exitcode}"

    def _stacks(self, rank):
        return str(Path(self._folder.name) / f"stacks{rank}")

    def _stack_of(self, rank):
        try:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(it has ended)"
        time.sleep(0.3)
        return Path(self._stacks(rank)).read_text()

    def close(self):
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
        self._connections = []
        self._folder.cleanup()


class Pools:
    """A pool for each world size, made when first asked for and again after a failure."""

    def __init__(self):
        self._pools = {}

    def __call__(self, world_size):
        pool = self._pools.get(world_size)
        if pool is None or not pool.is_open:
            pool = self._pools[world_size] = Pool(world_size)
        return pool

    def close(self):
        for pool in self._pools.values():
            pool.close()
