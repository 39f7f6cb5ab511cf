"""Builds the C++ kernels with the package where torch and a C++ compiler are there, and installs pure Python elsewhere.

What is installed is described in pyproject.toml. torch is no build requirement: an isolated build would download it.
`FUSIBLE_BUILD=0` leaves the kernels out.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from types import ModuleType

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PACKAGE = pathlib.Path(__file__).resolve().parent / "fusible"


def load_builder() -> ModuleType:
    """`fusible/build.py`, without the package around it, which may need what is not there."""
    spec = importlib.util.spec_from_file_location("fusible_build", PACKAGE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class KernelDistribution(Distribution):
    """Belongs to a platform once kernels were built into it."""

    with_kernels = False

    def has_ext_modules(self) -> bool:
        return self.with_kernels


class BuildKernels(Command):
    """Builds `_kernels.so` into the package, or says in one line why not."""

    description = "build the C++ kernels"
    user_options = ()
    editable_mode = False
    build_lib: str | None

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        builder = load_builder()
        assert self.build_lib is not None
        target = (PACKAGE if self.editable_mode else pathlib.Path(self.build_lib) / "fusible") / builder.LIBRARY.name
        if not self.editable_mode:
            target.unlink(missing_ok=True)  # of an earlier build
        if os.environ.get("FUSIBLE_BUILD") == "0":
            return say("without C++ kernels, as FUSIBLE_BUILD=0 asks")
        try:
            builder.check()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # one of other sources would be no fallback
            builder.build(target)
        except (builder.BuildError, OSError) as error:
            return say(f"without C++ kernels: {str(error).splitlines()[0]}; to add them later: python -m fusible build")
        self.distribution.with_kernels = not self.editable_mode
        return say("with C++ kernels")

    def get_outputs(self) -> list[str]:
        return []  # the wheel takes what lies in build_lib; an editable one refers to the source tree

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []  # they are package data


def say(how: str) -> None:
    print(f"fusible: installing {how}", file=sys.stderr, flush=True)


class Wheel(bdist_wheel):
    """One wheel serves every Python: the kernels know torch's stable ABI and no Python."""

    def run_command(self, command: str) -> None:
        super().run_command(command)
        if command == "build":
            self.root_is_pure = not self.distribution.has_ext_modules()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


class Build(build):
    sub_commands = [*build.sub_commands, ("build_kernels", None)]  # noqa: RUF012 - as setuptools declares it


setup(distclass=KernelDistribution, cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": Wheel})
