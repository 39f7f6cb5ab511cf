"""Builds the C++ kernels: `python -m fusible build`, and on installation where torch and a compiler are there.

One shared library against torch's stable ABI serves every Python and torch 2.11 and later. The loops are compiled
once per
instruction set and chosen when the library is loaded; the operators once.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

SOURCES = pathlib.Path(__file__).parent / "csrc"
LIBRARY = pathlib.Path(__file__).parent / "_kernels.so"

#: Loops, compiled per instruction set; operators, compiled once.
LOOPS = ("activation.cpp", "dropout.cpp", "gated.cpp", "loops.cpp", "norm.cpp")
OPERATORS = ("activation_ops.cpp", "dropout_ops.cpp", "gated_ops.cpp", "library.cpp", "memory.cpp", "norm_ops.cpp")

#: GCC turns a clamp's branches into precomputed denormals, which are slow (docs/measured.md); the last two keep it
#: from that.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno",
         "-fno-trapping-math")  # fmt: skip
GCC_FLAGS = ("-fno-thread-jumps", "-fno-split-paths", "-fno-tree-pre")
X86_SETS = {
    "base": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"


class BuildError(Exception):
    """The kernels cannot be built here; the text says why."""


def compiler() -> str:
    """The C++ compiler: `$CXX`, or the first of g++, clang++, c++. Raises `BuildError` if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise BuildError("no C++ compiler was found (looked for $CXX, g++, clang++, c++)")


def build(target: pathlib.Path = LIBRARY, extra_flags: tuple[str, ...] = ()) -> pathlib.Path:
    """Compiles the kernels into `target` and returns it. Raises `BuildError`, with the compiler's words, if that
    fails."""
    from torch.utils.cpp_extension import include_paths, library_paths

    cxx = compiler()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    gcc = "clang" not in subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    flags = [*FLAGS, *(GCC_FLAGS if gcc else ()), *extra_flags, TARGET, *(["-DFUSIBLE_X86"] if x86 else [])]
    includes = [f"-I{path}" for path in include_paths()]
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for isa, isa_flags in (X86_SETS if x86 else {"base": ()}).items():
            for source in LOOPS:
                output = f"{folder}/{isa}_{source}.o"
                jobs.append(
                    [cxx, *flags, *isa_flags, f"-DFUSIBLE_ISA={isa}", "-c", str(SOURCES / source), "-o", output]
                )
        for source in OPERATORS:
            jobs.append([cxx, *flags, *includes, "-c", str(SOURCES / source), "-o", f"{folder}/{source}.o"])
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        built = f"{folder}/_kernels.so"
        libraries = [f"-L{path}" for path in library_paths()]
        _run(
            [
                cxx,
                "-shared",
                *extra_flags,
                *[job[-1] for job in jobs],
                *libraries,
                "-ltorch_cpu",
                "-ltorch",
                "-lc10",
                "-s",
                "-o",
                built,
            ]
        )
        shutil.copyfile(built, f"{target}.new")
        os.replace(f"{target}.new", target)  # a process that has the old one loaded keeps it
    return target


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{' '.join(command[:1])} failed on {command[-3]}:\n{result.stderr.strip()}")
