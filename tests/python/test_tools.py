# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The scripts of tools/ where something is not as they need it: they say so."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_style_does_not_pass_without_files(tmp_path):
    (tmp_path / "tools" / "ci").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "ci" / "style", tmp_path / "tools" / "ci")
    done = subprocess.run(
        [tmp_path / "tools" / "ci" / "style"],
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0 and "git lists no sources here" in done.stderr, done.stdout + done.stderr
    assert "safe.directory" in done.stderr and "clang-format" not in done.stdout


OLD_PYTHON = """\
#!/bin/sh
case "$*" in
  *version_info*) exit 0 ;;  # asked whether it is too old
  -V) echo Python 3.9.2 ;;
esac
"""


def test_set_up_says_that_the_python_of_venv_is_too_old(tmp_path):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup", tmp_path / "tools")
    for name in ("python", "python3"):
        (folder / name).write_text(OLD_PYTHON)
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [tmp_path / "tools" / "setup"],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},  # as make has it
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1 and ".venv has Python 3.9.2: remove .venv" in done.stderr, done.stdout + done.stderr
    assert (folder / "python").exists()
