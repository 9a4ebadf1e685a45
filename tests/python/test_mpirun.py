# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Programs with a process group that mpirun has started, as docs/training.md shows it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cortado
import pytest
from ranks import free_port

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None or shutil.which("ompi_info") is None, reason="Open MPI is not installed"
)

ROOT = Path(__file__).resolve().parents[2]
OPEN_MPI = {  # more ranks than cores, as root in containers, without warnings
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_base_warn_component_unused": "0",
    "MPIEXEC_TIMEOUT": "90",  # seconds until it ends all processes
}


def mpirun(*command):
    """Runs it on two ranks; a process group's variables are those of mpirun alone."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= OPEN_MPI | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        ["mpirun", "-n", "2", *command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_with_a_reducer_trains():
    printed = mpirun(sys.executable, str(ROOT / "examples/train_reducer.py"), "--steps", "10")
    assert "acp(rank=4) over callback(gloo), world size 2, 10 steps" in printed


@pytest.mark.slow
def test_a_program_that_knows_nothing_of_mpirun_is_told_by_a_shell(tmp_path):
    file = tmp_path / "cluster.json"
    program = f"exec {sys.executable} -m cortado.calibrate -o {file} --budget 0.5 --codec 'cast(bf16)'"
    printed = mpirun("sh", "-c", f"RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE {program}")
    assert "2 ranks (all), 1 codecs, over callback(gloo)" in printed
    assert [level["ranks"] for level in cortado.Cluster.load(file).to_dict()["levels"]] == [2]
