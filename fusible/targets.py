"""What a command works on: `FILE.py:OBJECT`, and the tensors that it is called with. Shared by all commands.

OBJECT is a `torch.nn.Module`, or a function without arguments that returns one. The tensors come from `--input`
options, else from what the file calls `example_inputs` or `inputs`: a tensor, a tuple or list of them, a dictionary for
keywords, or a function without arguments that returns one of these.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Target", "TargetError", "load", "parse_input"]

#: What a file may call the tensors for its object.
NAMES = ("example_inputs", "inputs")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "bool")


class TargetError(ValueError):
    """A user's mistake, in one line."""


@dataclass(frozen=True)
class Target:
    """A module, and how to call it; no inputs if neither options nor file gave some."""

    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load(target: str, inputs: Sequence[str] = ()) -> Target:
    """Runs the file and takes the object out of it. Raises `TargetError`."""
    file, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier() or not file:
        raise TargetError(f"{target}: must be FILE.py:OBJECT, as in model.py:block")
    given = tuple(parse_input(text) for text in inputs)
    space = _run(file)
    if name not in space:
        known = [key for key, value in space.items() if isinstance(value, torch.nn.Module)]
        raise TargetError(f"{file} has no {name}" + (f"; it has {', '.join(known)}" if known else ""))
    module = _called(space[name], f"{file}:{name}")
    if not isinstance(module, torch.nn.Module):
        kind = type(module).__name__
        raise TargetError(
            f"{file}:{name} must be a torch.nn.Module, or a function without arguments that returns one, got {kind}"
        )
    if given:
        return Target(module, given)
    args, kwargs = _beside(space, file)
    return Target(module, args, kwargs)


def parse_input(text: str) -> torch.Tensor:
    """`8x512` or `8x512:bfloat16`: random numbers that require a gradient, zeros where the dtype is not floating."""
    shape, _, dtype = text.partition(":")
    dtype = dtype or "float32"
    sizes = shape.split("x")
    if not all(size.isdecimal() for size in sizes) or dtype not in DTYPES:
        raise TargetError(
            f"--input {text}: must be sizes and perhaps a dtype, as 8x512 or 8x512:bfloat16; dtypes are "
            f"{', '.join(DTYPES)}"
        )
    kind: torch.dtype = getattr(torch, dtype)
    dims = [int(size) for size in sizes]
    if not kind.is_floating_point:
        return torch.zeros(dims, dtype=kind)
    return torch.randn(dims).to(kind).requires_grad_()


def _run(file: str) -> dict[str, Any]:
    path = pathlib.Path(file)
    if not path.is_file():
        raise TargetError(f"{file}: no such file")
    name = f"fusible_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{file}: must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as pickle and dataclasses expect of a module that runs
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(f"{file}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return vars(module)


def _called(value: Any, what: str) -> Any:
    """A module or tensors as they are; a function's result."""
    if isinstance(value, (torch.nn.Module, torch.Tensor)) or not callable(value):
        return value
    try:
        return value()
    except Exception as error:
        raise TargetError(f"{what}(): {type(error).__name__}: {error}") from error


def _beside(space: dict[str, Any], file: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs that the file gives."""
    for name in NAMES:
        if name in space:
            found = _called(space[name], f"{file}:{name}")
            if isinstance(found, torch.Tensor):
                return (found,), {}
            if isinstance(found, dict):
                return (), found
            if isinstance(found, (tuple, list)):
                return tuple(found), {}
            raise TargetError(
                f"{file}:{name} must be a tensor, a tuple or list of them, or a dictionary, got {type(found).__name__}"
            )
    return (), {}
