"""A progress bar for what takes long: with rich, on a terminal, after a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["progress"]

#: Seconds before a bar is shown.
PATIENCE = 1.0


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each of `total` parts of the work; the bar goes to stderr and away at the end.

    Nothing is shown where rich is not installed, stderr is no terminal, or everything is done within a second.
    """
    bar: Any = None
    start, done = time.monotonic(), 0
    possible = sys.stderr.isatty()

    def advance() -> None:
        nonlocal bar, done
        done += 1
        if bar is None and possible and time.monotonic() - start > PATIENCE:
            bar = _bar(what, total)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def _bar(what: str, total: int) -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    bar = Progress(console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total)
    bar.start()
    return bar
