"""What this installation can do: versions, devices, kernel backends. Nothing is probed before `info()` is called."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Backend", "Device", "Info", "info"]


@dataclass(frozen=True)
class Device:
    """A device that torch can use, or the reason why a kind of device is missing."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class Backend:
    """A kernel backend: whether its kernels can run here, and how many there are, or why not."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class Info:
    """Versions, devices and kernel backends; `str()` is the report, `to_dict()` the same as plain values."""

    fusible: str
    torch: str
    python: str
    platform: str
    devices: tuple[Device, ...]
    backends: tuple[Backend, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values that `json.dumps` takes."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"fusible {self.fusible}, torch {self.torch}, Python {self.python}, {self.platform}"]
        for title, rows in (("devices", self.devices), ("kernels", self.backends)):
            lines += ["", title]
            lines += [f"  {row.name:<10} {'yes' if row.available else 'no':<4} {row.detail}" for row in rows]
        return "\n".join(lines)


def info() -> Info:
    """Reports versions, devices and, for each kernel backend, whether it is there or why not.

    `print(fusible.info())` is the text to put into a bug report.
    """
    return Info(
        fusible=_version(),
        torch=torch.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        devices=(_cpu(), *_cuda()),
        backends=_backends(),
    )


def _version() -> str:
    try:
        return importlib.metadata.version("fusible")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _cpu() -> Device:
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    return Device("cpu", True, f"{threads} {'thread' if threads == 1 else 'threads'}, {capability}")


def _cuda() -> list[Device]:
    if torch.version.cuda is None and torch.version.hip is None:
        return [Device("cuda", False, "this torch is built without it")]
    if not torch.cuda.is_available():
        return [Device("cuda", False, "torch finds no device")]
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        detail = f"{properties.name}, {memory:.0f} GiB, capability {properties.major}.{properties.minor}"
        devices.append(Device(f"cuda:{index}", True, detail))
    return devices


def _backends() -> tuple[Backend, ...]:
    from fusible.kernels.registry import KERNELS

    def count(name: str) -> int:
        return sum(any(backend.name == name for backend in kernel.backends) for kernel in KERNELS.values())

    return (
        Backend("reference", True, f"{len(KERNELS)} kernels in plain torch, on every device"),
        _backend("cpu", count("cpu"), None if count("cpu") else _no_cpu()),
        _backend("triton", count("triton"), _no_triton(count("triton"))),
    )


def _backend(name: str, kernels: int, missing: str | None) -> Backend:
    return Backend(name, missing is None, missing or f"{kernels} {'kernel' if kernels == 1 else 'kernels'}")


def _no_cpu() -> str:
    from fusible.kernels import library

    return library.why_not() or "its kernels are not registered"


def _no_triton(kernels: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not kernels:
        return "no Triton kernels in this version"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"
