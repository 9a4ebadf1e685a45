# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""`import cortado` needs nothing but Python."""

import subprocess
import sys

import pytest

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
import cortado
assert "torch" not in sys.modules
"""


def run(code):
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=30, check=False)


def test_cortado_imports_without_torch_and_checks_codec_strings():
    done = run("print(cortado.__version__, cortado.canonical_spec('acp( rank = 4 )'), sorted(cortado.__all__)[0])")
    assert done.returncode == 0, done.stderr
    assert "acp(rank=4)" in done.stdout


@pytest.mark.parametrize("name", ["attach", "ddp_hook", "report"])
def test_what_needs_torch_says_so(name):
    done = run(f"cortado.{name}(None)")
    assert done.returncode == 1
    assert f"CortadoError: cortado.{name} needs PyTorch 2.11 or later" in done.stderr
    assert "No module named 'torch'" in done.stderr


def test_an_unknown_name_is_an_attribute_error():
    assert "has no attribute 'atach'" in run("cortado.atach").stderr
