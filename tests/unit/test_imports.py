"""A shard's host has no torch, and the command line does not wait for anything heavy.

Each check runs in a process of its own: this one may have imported everything.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import shoestring

ROOT = Path(shoestring.__file__).parent
BLOCK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"`{{name}}` is blocked in this test", name=name)

sys.meta_path.insert(0, Refuse())
"""
HEAVY = ("numba", "numpy", "torch", "triton")


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_of(*packages: str) -> list[str]:
    """Every module under these packages that is there, but for the codec's GPU files."""
    files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
    names = [file.relative_to(ROOT.parent).with_suffix("").as_posix().replace("/", ".") for file in files]
    return [
        name.removesuffix(".__init__") for name in names if not name.startswith("shoestring.codec.dct.gpu")
    ]


MODULES = modules_of("checkpoint", "cli", "codec", "compiled", "model", "server", "wire")


def test_there_are_modules_to_check():
    assert "shoestring.codec.base" in MODULES


def test_every_module_of_a_shard_and_the_command_line_imports_without_torch():
    imports = "".join(f"import {module}\n" for module in MODULES)
    run_python(BLOCK.format(blocked=("torch", "triton")) + imports)


def test_every_module_can_be_the_first_that_is_imported():
    """In a child for each module, which is forked before anything of this package was imported."""
    # Imported once for all children: they are what takes long, and not what is tested.
    libraries = "import numba, numpy, psutil, rich.console, safetensors, typer, zmq, zmq.auth\n"
    found = run_python(
        libraries
        + f"""
import os, sys, traceback

for module in {MODULES!r}:
    child = os.fork()
    if child == 0:
        try:
            __import__(module)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        print(module, "crashed")
"""
    )
    assert found == "", found


def test_every_codec_is_described_and_encodes_without_torch():
    run_python(
        BLOCK.format(blocked=("torch", "triton"))
        + """
import numpy as np
import shoestring
from shoestring.codec import registry

layout = shoestring.Layout.of([(16, 16), (5,)])
values = np.arange(layout.total, dtype=np.float32)
for name in registry.names():
    assert registry.describe(name)
    codec = shoestring.make_codec(name)
    codec.decode(codec.encode(values, layout), layout, np.empty_like(values))
"""
    )


@pytest.mark.parametrize("module", ["shoestring", "shoestring.errors", "shoestring.cli"])
def test_light_modules_need_nothing_heavy(module):
    run_python(BLOCK.format(blocked=HEAVY) + f"import {module}")


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        _ = shoestring.nothing
