"""The C++ loops for other instruction sets than the best: the kernels' tests again, as on an older machine."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys

import pytest

from fusible.kernels import library

TESTS = pathlib.Path(__file__).parent
FILES = ("test_cpu_math.py", "test_cpu_norm.py", "test_cross_entropy.py")
CODE = """
import sys, torch
from fusible.kernels import library
print(library.load() and torch.ops.fusible.isa(int(sys.argv[1])))
"""


@pytest.mark.skipif(not library.load(), reason=f"the C++ kernels are {library.why_not()}")
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="one instruction set only")
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "number"), [("avx2", 2), ("default", 0)])
def test_kernels_with_another_instruction_set(capability, number):
    """`ATEN_CPU_CAPABILITY` is torch's own switch."""
    options = {"env": {**os.environ, "ATEN_CPU_CAPABILITY": capability}, "capture_output": True, "text": True}
    chosen = subprocess.run([sys.executable, "-c", CODE, str(number)], check=True, **options)
    assert chosen.stdout.strip() == "True"
    tests = [str(TESTS / name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.run(command, cwd=TESTS.parent, check=False, **options)
    assert process.returncode == 0, process.stdout[-3000:]
