# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""tools/ci/torch with a python that installs nothing: it vouches for the version it was asked for, or fails."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "ci" / "torch"

# As an index that lacks the version: pip refuses it, and what needs torch brings along another.
PYTHON = """\
#!/bin/bash
case "$*" in
  *"torch==2.11.0"*) exit 1 ;;
  *__version__*) echo {found} ;;
esac
"""


@pytest.mark.parametrize(
    "found, is_good", [("2.11.0", True), ("2.11.0+cpu", True), ("2.11.1", False), ("2.13.0", False)]
)
def test_another_version_is_no_success(tmp_path, found, is_good):
    (tmp_path / "tools" / "ci").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "tools" / "ci")
    python = tmp_path / "build" / "torch-2.11.0" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(found=found))
    python.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "tools" / "ci" / "torch", "2.11.0"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode == 0) == is_good, done.stderr
    assert ("tests pass with 2.11.0" in done.stdout) == is_good
    assert is_good or f"expected 2.11.0 in build/torch-2.11.0, found {found}" in done.stderr
