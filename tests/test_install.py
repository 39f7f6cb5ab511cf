"""Wheels with and without the C++ kernels, made by pip from a copy of the sources; see setup.py."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import fusible.__main__
from fusible import build
from fusible.kernels import library

ROOT = pathlib.Path(__file__).parent.parent
KERNELS = "fusible/_kernels.so"


def wheel(folder: pathlib.Path, **environment: str) -> tuple[zipfile.ZipFile, str]:
    """The wheel of this package, and the line that its build printed."""
    sources = folder / "sources"
    sources.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "fusible", sources / "fusible", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-index", "--no-build-isolation", "--no-deps"]
    made = subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(sources)],
        env={**os.environ, "CXX": "", **environment},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    lines = [line.strip() for line in (made.stdout + made.stderr).splitlines()]
    (line,) = [line for line in lines if line.startswith("fusible: ")]
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file), line


def test_a_wheel_without_kernels_is_pure_python_and_can_build_them(tmp_path):
    """Also where the source tree has a library: that is of this machine, and maybe of other sources."""
    made, line = wheel(tmp_path, FUSIBLE_BUILD="0")
    assert line == "fusible: installing without C++ kernels, as FUSIBLE_BUILD=0 asks"
    assert made.filename.endswith("-py3-none-any.whl")
    assert KERNELS not in made.namelist()
    sources = {f"fusible/csrc/{file.name}" for file in (ROOT / "fusible" / "csrc").iterdir()}
    assert sources <= set(made.namelist())


@pytest.mark.skipif(shutil.which("false") is None, reason="there is no command that fails")
def test_a_failing_compiler_fails_no_installation(tmp_path):
    made, line = wheel(tmp_path, CXX="false")
    assert line.startswith("fusible: installing without C++ kernels: false failed on ")
    assert line.endswith("; to add them later: python -m fusible build")
    assert made.filename.endswith("-py3-none-any.whl")
    assert KERNELS not in made.namelist()


@pytest.mark.slow
@pytest.mark.skipif(not library.built(), reason="the C++ kernels were not built here, so maybe they cannot be")
def test_a_wheel_with_kernels_belongs_to_a_platform_and_to_every_python(tmp_path):
    made, line = wheel(tmp_path)
    assert line == "fusible: installing with C++ kernels"
    assert "-py3-none-" in made.filename
    assert not made.filename.endswith("-any.whl")
    assert KERNELS in made.namelist()
    (metadata,) = [name for name in made.namelist() if name.endswith(".dist-info/WHEEL")]
    assert "Root-Is-Purelib: false" in made.read(metadata).decode()


def test_every_source_is_compiled_once_per_instruction_set_or_once():
    including = {f.name for f in build.SOURCES.glob("*.cpp") if "STABLE_TORCH_LIBRARY" in f.read_text()}
    assert including - {"memory.cpp"} == set(build.operators()) - {"memory.cpp"}
    assert "norm.cpp" in build.loops()
    assert not set(build.loops()) & set(build.operators())


@pytest.mark.skipif(not library.load(), reason=f"the C++ kernels are {library.why_not()}")
def test_a_library_of_other_sources_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SOURCES", shutil.copytree(build.SOURCES, tmp_path / "csrc"))
    assert library._error.__wrapped__() is None
    (tmp_path / "csrc" / "norm.cpp").write_text("// another")
    assert library._error.__wrapped__() == "built from other sources; run: python -m fusible build"
    monkeypatch.setattr(build, "SOURCES", tmp_path / "none")  # installed without them
    assert library._error.__wrapped__() is None


def test_what_cannot_be_built_says_why(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    with pytest.raises(build.BuildError, match=r"^the kernels need torch 2\.11, this is 2\.10\.1\+cpu$"):
        build.build(tmp_path / "made.so")
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match=r"^no C\+\+ compiler was found \(looked for \$CXX, g\+\+, clang\+\+, c"):
        build.build(tmp_path / "made.so")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match="^torch is not there while building$"):
        build.build(tmp_path / "made.so")
    assert list(tmp_path.iterdir()) == []


def test_the_build_command_needs_no_extra_and_fails_in_words(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["fusible", "build"])
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(build, "build", lambda: tmp_path / "_kernels.so")
    assert fusible.__main__.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "built _kernels.so; the next start of Python uses it"

    def fail():
        raise build.BuildError("g++ failed on norm.cpp for base\nnorm.cpp:1: no")

    monkeypatch.setattr(build, "build", fail)
    assert fusible.__main__.main() == 1
    assert capsys.readouterr().err == "fusible: g++ failed on norm.cpp for base\nnorm.cpp:1: no\n"
