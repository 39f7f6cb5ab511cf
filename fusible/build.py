"""Builds the C++ kernels: `python -m fusible build`, and on installation where torch and a compiler are there.

One shared library against torch's stable ABI serves every Python and torch 2.11 and later. The loops are compiled once
per instruction set and chosen when the library is loaded; the operators once. `setup.py` runs this file without the
package around it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

SOURCES = pathlib.Path(__file__).parent / "csrc"
LIBRARY = pathlib.Path(__file__).parent / "_kernels.so"

#: Files without loops that belong to no family.
PLAIN = ("library", "memory")
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
OLDEST_TORCH = (2, 11)
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
#: For `make sanitize`.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g1", "-O1")


def operators() -> list[str]:
    """The files with operators, compiled once; those with loops are compiled per instruction set."""
    return sorted(path.name for path in SOURCES.glob("*.cpp") if path.stem.endswith("_ops") or path.stem in PLAIN)


def loops() -> list[str]:
    """The files with loops."""
    return sorted({path.name for path in SOURCES.glob("*.cpp")} - set(operators()))


def digest() -> int:
    """What the kernels are built from, as a number, to tell a library that was built from other sources."""
    texts = [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.glob("*.*"))]
    return int.from_bytes(hashlib.sha256(b"".join(texts)).digest()[:7], "little")


class BuildError(Exception):
    """The kernels cannot be built here; the text says why."""


def compiler() -> str:
    """The C++ compiler: `$CXX`, or the first of g++, clang++, c++. Raises `BuildError` if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise BuildError("no C++ compiler was found (looked for $CXX, g++, clang++, c++)")


def check() -> None:
    """Raises `BuildError` if torch or a compiler is missing, or torch is too old."""
    if importlib.util.find_spec("torch") is None:
        raise BuildError("torch is not there while building")
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise BuildError(f"the kernels need torch {'.'.join(map(str, OLDEST_TORCH))}, this is {torch.__version__}")
    compiler()


def build(target: pathlib.Path = LIBRARY, extra_flags: tuple[str, ...] = ()) -> pathlib.Path:
    """Compiles the kernels into `target` and returns it.

    Raises `BuildError`, with the compiler's words, if that fails, or what `check` raises. A file that is there is
    replaced at the end, in one step.
    """
    check()
    with tempfile.TemporaryDirectory() as folder:
        commands = _compilations(folder, extra_flags)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source: _run(commands[source], source), commands))
        built = f"{folder}/_kernels.so"
        _run(_linking([command[-1] for command in commands.values()], built, extra_flags), built)
        shutil.copyfile(built, f"{target}.new")
        os.replace(f"{target}.new", target)  # a process that has the old one loaded keeps it
    return target


def main() -> int:
    """`python -m fusible build`: builds beside the package, and returns the exit code."""
    print("compiling the C++ kernels, about a minute", flush=True)
    try:
        target = build()
    except (BuildError, OSError) as error:
        print(f"fusible: {error}", file=sys.stderr)
        return 1
    print(f"built {target.name}; the next start of Python uses it")
    return 0


def _compilations(folder: str, extra_flags: tuple[str, ...]) -> dict[str, list[str]]:
    """The commands that make objects, by what they compile; the last argument is the object."""
    from torch.utils.cpp_extension import include_paths

    cxx = compiler()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    gcc = "clang" not in subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    flags = [*FLAGS, *(GCC_FLAGS if gcc else ()), *extra_flags, TARGET, *(["-DFUSIBLE_X86"] if x86 else [])]
    commands = {}
    for isa, isa_flags in (X86_SETS if x86 else {"base": ()}).items():
        for source in loops():
            made = ["-c", str(SOURCES / source), "-o", f"{folder}/{isa}_{source}.o"]
            commands[f"{source} for {isa}"] = [cxx, *flags, *isa_flags, f"-DFUSIBLE_ISA={isa}", *made]
    includes = [f"-I{path}" for path in include_paths()]
    for source in operators():
        made = ["-c", str(SOURCES / source), "-o", f"{folder}/{source}.o"]
        commands[source] = [cxx, *flags, *includes, f"-DFUSIBLE_SOURCES={digest()}", *made]
    return commands


def _linking(objects: list[str], built: str, extra_flags: tuple[str, ...]) -> list[str]:
    from torch.utils.cpp_extension import library_paths

    libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-ltorch", "-lc10"]
    strip = [] if extra_flags else ["-s"]
    return [compiler(), "-shared", *extra_flags, *objects, *libraries, *strip, "-o", built]


def _run(command: list[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{command[0]} failed on {pathlib.Path(what).name}\n{result.stderr.strip()}")
