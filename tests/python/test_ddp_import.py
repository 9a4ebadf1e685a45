# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""`import cortado` needs nothing but Python."""

import subprocess
import sys

import pytest

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
import cortado
assert "torch" not in sys.modules
"""


def run(code, blocked=("torch", "numpy")):
    code = f"BLOCKED = {blocked}\n{BLOCK}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


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


def said_of(code, cases):
    """A program that imports torch, once, and prints the error that ``code`` ends with for each case, if any."""
    return f"""
import torch
for case in {cases}:
    try:
        {code}
        print(f"{{case}}: ")
    except cortado.CortadoError as error:
        print(f"{{case}}: {{error}}")
"""


def test_a_missing_framework_is_told():
    names = ["lightning", "transformers"]
    done = run(said_of("getattr(cortado, case).attach", names), blocked=(*names, "pytorch_lightning"))
    assert done.returncode == 0, done.stderr
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"{name}: cortado.{name} needs the package {name} (pip install {name}); importing it")
        assert f"cortado.{name} needs PyTorch 2.11" in run(f"cortado.{name}").stderr


def test_torch_without_numpy_is_told():
    done = run("cortado.attach(None)", blocked=("numpy",))
    assert done.returncode == 1
    assert "cortado.attach needs PyTorch 2.11 or later with torch.distributed, and NumPy" in done.stderr
    assert "No module named 'numpy'" in done.stderr


def test_an_old_torch_is_told():
    is_old = {"2.9.1": True, "2.10.0+cpu": True, "2.11.0a0+git1": False, "3.0": False}
    set_version = "torch.__version__ = torch.torch_version.TorchVersion(case)"
    done = run(said_of(f"{set_version}; cortado.attach", list(is_old)), ())
    assert done.returncode == 0, done.stderr
    for (version, is_told), line in zip(is_old.items(), done.stdout.splitlines(), strict=True):
        assert line.startswith(f"{version}: ")
        assert line.endswith(f"and NumPy; this is PyTorch {version}") == is_told, line
        assert is_told or line == f"{version}: "


def test_an_unknown_name_is_an_attribute_error():
    assert "has no attribute 'atach'" in run("cortado.atach").stderr
