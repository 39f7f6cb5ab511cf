"""Kernels and their backends: one name, a plain torch body, and faster bodies where they apply.

    @kernel
    def silu(x): ...                          # the torch body: formula, fallback, and the truth of the tests

    @silu.backend("cpu", lambda device, dtype, width: dtype in FLOATS)
    def _(x): ...

A kernel is chosen by what is part of a plan's key: device type, dtype and last dimension of its first argument, and the
forced backend (`use`). Never by the number of rows or by layout: bodies take any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

#: Order of preference on each device; the torch body comes last everywhere.
BACKENDS = ("cpu", "triton")
REFERENCE = "reference"
#: Choices that one kernel remembers.
MAX_CHOICES = 1024

Condition = Callable[[str, torch.dtype, int], bool]


class Backend(NamedTuple):
    name: str
    applies: Condition
    body: Callable[..., Any]


Around = Callable[[str, str, Callable[[], Any], Any], Any]


class _State(threading.local):
    forced: str | None = None
    calls: list[tuple[str, str]] | None = None
    device: str | None = None
    around: Around | None = None


_state = _State()
#: Open `record_calls` of all threads: while there is none, a kernel without backends looks no further.
_recorders: list[list] = []
KERNELS: dict[str, Kernel] = {}


class Kernel:
    """A function on tensors with a plain body and, perhaps, faster ones. Call it like a function."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body
        self.name = body.__name__
        self.backends: list[Backend] = []
        self._chosen: dict[tuple, Callable[..., Any]] = {}
        self.__doc__ = body.__doc__
        self.__name__ = body.__name__
        self.__wrapped__ = body

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        if _recorders:
            return self._recorded(x, *args, **options)
        if not self.backends:
            return self.body(x, *args, **options)
        try:
            key = x.device, x.dtype, x.shape[-1], _state.forced  # the device, as its type costs ten times that
        except IndexError:  # a scalar
            return self.body(x, *args, **options)
        body = self._chosen.get(key)
        if body is None:
            body = self._choose_body(key)
        return body(x, *args, **options)

    def _recorded(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Notes which backend would run, and runs the torch body, which takes fake tensors too."""
        if _state.calls is None:
            return self.body(x, *args, **options)
        chosen = self.choose(_state.device or x.device.type, x.dtype, x.shape[-1] if x.shape else None)
        backend = chosen.name if chosen else "torch"
        _state.calls.append((self.name, backend))
        if _state.around is None:
            return self.body(x, *args, **options)
        given = (x, *args, *options.values())
        return _state.around(self.name, backend, lambda: self.body(x, *args, **options), given)

    def _choose_body(self, key: tuple[torch.device, torch.dtype, int, str | None]) -> Callable[..., Any]:
        device, dtype, width, _ = key
        chosen = self.choose(device.type, dtype, width)
        if len(self._chosen) >= MAX_CHOICES:
            self._chosen.clear()
        return self._chosen.setdefault(key, chosen.body if chosen else self.body)

    def choose(self, device: str, dtype: torch.dtype, width: int | None) -> Backend | None:
        """The backend that runs this kind of call, or `None` for the torch body."""
        for backend in self.backends:
            if _state.forced in (None, backend.name) and width is not None and backend.applies(device, dtype, width):
                return backend
        return None

    def native(self, env: Any) -> bool:
        """Whether a backend of our own, not the torch body, serves this env."""
        return self.choose(env.device_type, env.dtype, env.width) is not None

    def backend(self, name: str, applies: Condition) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a faster body for the calls for which `applies(device type, dtype, width)` holds."""

        def register(body: Callable[..., Any]) -> Callable[..., Any]:
            if name not in BACKENDS:
                raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
            self.backends.append(Backend(name, applies, body))
            self.backends.sort(key=lambda b: BACKENDS.index(b.name))
            return body

        return register

    def __repr__(self) -> str:
        return f"<kernel {self.name}: {', '.join([b.name for b in self.backends] + ['torch'])}>"


def kernel(body: Callable[..., Any]) -> Kernel:
    """Makes a kernel of its plain torch body. Its first argument is the tensor by which a backend is chosen."""
    if body.__name__ in KERNELS:
        raise ValueError(f"there is a kernel {body.__name__} already; kernels' names are unique")
    return KERNELS.setdefault(body.__name__, Kernel(body))


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Forces one backend in this thread: `"reference"` (the torch bodies), `"cpu"` or `"triton"`.

    Kernels that the backend lacks run their torch bodies. Raises `ValueError` on an unknown name.
    """
    if backend not in (REFERENCE, *BACKENDS):
        raise ValueError(f"kernels.use({backend!r}): the backend must be one of {', '.join((REFERENCE, *BACKENDS))}")
    before, _state.forced = _state.forced, backend
    try:
        yield
    finally:
        _state.forced = before


def forced() -> str | None:
    """The backend forced by `use` in this thread."""
    return _state.forced


@contextmanager
def record_calls(device: str | None = None, around: Around | None = None) -> Iterator[list[tuple[str, str]]]:
    """Lists (kernel, backend) of each kernel call of this thread, while it is open; torch bodies run, on any tensors.

    `device` is what backends are chosen for, if not the tensors' own; `around(kernel, backend, run, arguments)` runs
    each call and returns what it returned.
    """
    before = _state.calls, _state.device, _state.around
    calls: list[tuple[str, str]] = []
    _state.calls, _state.device, _state.around = calls, device, around
    _recorders.append(calls)
    try:
        yield calls
    finally:
        _state.calls, _state.device, _state.around = before
        _recorders.pop()
