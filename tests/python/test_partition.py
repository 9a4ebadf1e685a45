# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The link of one rank goes down in the middle of training: every rank ends with an error in time, and a job started
again from the checkpoint goes on to the bits of the first one."""

import contextlib
import faulthandler
import itertools
import json
import sys
import time
from pathlib import Path

import pytest
from nets import loss_of, make_batch, make_net, make_optimizer
from ranks import Program, fingerprint, slack_s
from test_ddp_faults import ROLL_CALL_S, check_place

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

import links as shaped

RANKS, CUT = 3, 2  # the store is in rank 0
TIMEOUT_S = 5
SAVED_STEP, LAST_STEP = 3, 6


# ---- in a rank -------------------------------------------------------------------------------------------------------


def say(**what):
    print(json.dumps(what), flush=True)


def main(front, plan, folder, resumes):
    """Saves before SAVED_STEP, tells its bits after LAST_STEP, and trains on until an error comes."""
    import cortado
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(90, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = make_net()
    if front == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.002)
        exchange = cortado.attach(model, plan, verbose=False)
    else:
        model, exchange = net, cortado.Reducer(net, plan, verbose=False)
    optimizer = make_optimizer(model)
    parts = {"net": net, "optimizer": optimizer, "cortado": exchange}
    path = f"{folder}/rank{dist.get_rank()}.pt"
    if resumes:
        for name, saved in torch.load(path, weights_only=True).items():
            parts[name].load_state_dict(saved)
    for step in itertools.count(SAVED_STEP if resumes else 0):
        if step == SAVED_STEP and not resumes:
            torch.save({name: part.state_dict() for name, part in parts.items()}, path)
        if step == LAST_STEP:
            say(bits=fingerprint(net))
            if resumes:
                return
        if step == LAST_STEP + 1:
            say(step=step)  # the step before has ended
        begin = time.monotonic()
        try:
            loss_of(model, make_batch(dist.get_rank(), step)).backward()
            if front == "reducer":
                exchange.wait()
        except cortado.PeerError as error:
            say(error=str(error), step=step, seconds=time.monotonic() - begin)
            sys.stdin.readline()  # until all have answered: the store goes with rank 0
            raise
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)


# ---- in pytest -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def job(links, *arguments):
    places = [(links.environment(rank), links.namespace(rank)) for rank in range(RANKS)]
    ranks = [Program(main, *arguments, environment=variables, namespace=name) for variables, name in places]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    "front, plan",
    [
        ("ddp", f"acp(rank=2, start_step=1, bucket_cap_mib=0, timeout_s={TIMEOUT_S})"),
        ("reducer", f"topk(density=0.1, min_elems=0, start_step=1, timeout_s={TIMEOUT_S})"),
    ],
)
def test_a_cut_link_ends_every_rank_and_the_job_goes_on_from_its_checkpoint(tmp_path, front, plan):
    with shaped.Links(RANKS) as links:
        with job(links, front, plan, str(tmp_path), False) as ranks:
            bits = {rank.hear()["bits"] for rank in ranks}
            assert len(bits) == 1
            assert [rank.hear()["step"] for rank in ranks] == [LAST_STEP + 1] * RANKS
            time.sleep(0.2)
            links.cut(CUT)
            answers = [rank.hear() for rank in ranks]
            for rank in ranks:
                _, said = rank.communicate("\n")
                assert rank.returncode == 1 and "PeerError" in said, said[-2000:]
        for rank, answer in enumerate(answers):
            check_place(answer["error"], answer["step"])
            assert answer["step"] > LAST_STEP
            assert answer["seconds"] < TIMEOUT_S + ROLL_CALL_S + slack_s()
            # Who has lost the store can say no more than that; the others name who is missing.
            missing = "rank 0, or the link to it is gone" if rank == CUT else f"rank {CUT} did not answer"
            assert missing in answer["error"]
        links.mend(CUT)
        with job(links, front, plan, str(tmp_path), True) as ranks:
            assert {rank.hear()["bits"] for rank in ranks} == bits
