"""What `python -m fusible calibrate` measured on this machine, kept as one JSON file in the user's cache folder.

Read when somebody asks for predicted times, and only believed on the machine, with the threads and the versions that it
was measured with. `FUSIBLE_CALIBRATION` names another file.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["HOW", "Calibration", "CalibrationError", "find", "location", "machine", "save", "use"]

#: Files of another version are refused.
VERSION = 1
HOW = "run: python -m fusible calibrate"
Curve = tuple[tuple[float, float], ...]


class CalibrationError(ValueError):
    """A calibration that cannot be used here; the text says why, and what to do."""


@dataclass(frozen=True)
class Calibration:
    """Rates of one machine.

    Attributes:
        machine: what it was measured on (`machine()`).
        created: when, as an ISO date and time.
        reused, fresh: points (bytes moved, bytes per second) of a copy into memory used before, and of an operation
            whose result is a fresh allocation by torch.
        products: per dtype, points (FLOPs, FLOPs per second) of matrix products.
        factors: per kernel and dtype, its time over that of a copy that moves as many bytes.
        overhead: seconds that a step costs beside its work.
    """

    machine: dict[str, Any]
    created: str
    reused: Curve
    fresh: Curve
    products: dict[str, Curve]
    factors: dict[str, dict[str, float]]
    overhead: float

    def memory_rate(self, size: int, fresh: bool = False) -> float:
        """Bytes per second, read and written, where `size` bytes are moved."""
        return _interpolated(self.fresh if fresh else self.reused, size)

    def product_rate(self, dtype: torch.dtype, flops: int) -> float:
        """FLOPs per second of a matrix product of this size; the slowest known dtype's for one not measured."""
        curve = self.products.get(_short(dtype))
        if curve is not None:
            return _interpolated(curve, flops)
        return min(_interpolated(other, flops) for other in self.products.values())

    def factor(self, kernel: str, dtype: torch.dtype) -> float:
        """A kernel's time over that of a copy; 1 for one that was not measured."""
        return self.factors.get(kernel, {}).get(_short(dtype), 1.0)

    def summary(self) -> str:
        """The machine, and its best rates."""
        copies = f"copies {max(rate for _, rate in self.reused[-2:]) / 1e9:.1f} GB/s"
        products = [f"{name} products {max(rate for _, rate in curve) / 1e9:.0f} GFLOP/s"
                    for name, curve in self.products.items()]  # fmt: skip
        cpu, threads = self.machine.get("cpu"), self.machine.get("threads")
        return f"{cpu}, {threads} threads: {', '.join([copies, *products])}"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, as it is stored."""
        return {"version": VERSION, **asdict(self)}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _interpolated(curve: Curve, at: float) -> float:
    """Between the points on a double-logarithmic scale, level outside of them."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in itertools.pairwise(curve):
        if at <= right:
            share = math.log(at / left) / math.log(right / left)
            return low ** (1 - share) * high**share
    return curve[-1][1]


# -- the file ----------------------------------------------------------------------------------------------------------


def location() -> pathlib.Path:
    """Where the file is: `FUSIBLE_CALIBRATION`, or `fusible/calibration.json` in the platform's cache folder."""
    named = os.environ.get("FUSIBLE_CALIBRATION")
    return pathlib.Path(named) if named else _cache_folder() / "fusible" / "calibration.json"


def _cache_folder() -> pathlib.Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return pathlib.Path(local) if local else pathlib.Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return pathlib.Path.home() / "Library" / "Caches"
    named = os.environ.get("XDG_CACHE_HOME", "")
    return pathlib.Path(named) if pathlib.Path(named).is_absolute() else pathlib.Path.home() / ".cache"


def machine() -> dict[str, Any]:
    """This machine, as far as it decides how fast steps are: what a calibration must agree with."""
    from fusible.kernels import library

    return {
        "cpu": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": "C++" if library.load() else "torch's",
    }


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def save(calibration: Calibration, path: pathlib.Path) -> None:
    """Writes the file, whole or not at all. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(calibration.to_dict(), indent=1) + "\n")
    unfinished.replace(path)


def load(path: pathlib.Path) -> Calibration:
    """Reads a file. Raises `CalibrationError` if it is missing, broken, or of another machine or version."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise CalibrationError(HOW) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read ({error}); {HOW}") from None
    try:
        found = _parsed(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CalibrationError(f"{path} is not a calibration of this version of fusible; {HOW}") from None
    here = machine()
    for name, value in here.items():
        if found.machine.get(name) != value:
            was = found.machine.get(name, "unknown")
            raise CalibrationError(f"{path} was measured with {name} {was}, here it is {value}; {HOW}")
    return found


def _parsed(data: Mapping[str, Any]) -> Calibration:
    if data["version"] != VERSION:
        raise ValueError(data["version"])
    products = {name: _curve(points) for name, points in data["products"].items()}
    factors = {name: {dtype: _positive(value) for dtype, value in by_dtype.items()}
               for name, by_dtype in data["factors"].items()}  # fmt: skip
    if not products:
        raise ValueError("no products")
    return Calibration(
        dict(data["machine"]), str(data["created"]), _curve(data["reused"]), _curve(data["fresh"]), products, factors,
        _positive(data["overhead"]),
    )  # fmt: skip


def _curve(points: Any) -> Curve:
    curve = tuple((_positive(at), _positive(rate)) for at, rate in points)
    if not curve or any(left >= right for (left, _), (right, _) in itertools.pairwise(curve)):
        raise ValueError(points)
    return curve


def _positive(value: Any) -> float:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(value)
    return value


# -- which one is used -------------------------------------------------------------------------------------------------


class _InUse(threading.local):
    forced: Calibration | None = None
    is_forced = False


_in_use = _InUse()
_read: dict[tuple, Calibration | CalibrationError] = {}


@contextmanager
def use(calibration: Calibration | None) -> Iterator[None]:
    """Uses a calibration in this thread in place of the file's; `None` for none at all."""
    before = _in_use.forced, _in_use.is_forced
    _in_use.forced, _in_use.is_forced = calibration, True
    try:
        yield
    finally:
        _in_use.forced, _in_use.is_forced = before


def find() -> tuple[Calibration | None, str]:
    """The calibration in use, or `None` and the reason why there is none. Reads the file if it has changed."""
    if _in_use.is_forced:
        return _in_use.forced, "" if _in_use.forced else HOW
    path = location()
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return None, HOW
    key = path, changed, torch.get_num_threads()
    if key not in _read:
        _read.clear()
        try:
            _read[key] = load(path)
        except CalibrationError as error:
            _read[key] = error
    found = _read[key]
    return (found, "") if isinstance(found, Calibration) else (None, str(found))
