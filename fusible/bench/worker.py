"""One variant of one row in a process of its own: its first call is a first call, and its memory nobody else's.

What any program pays once is paid before: torch's own imports of a first backward, its threads, the machine's memory.

The parent asks one thing at a time, so the variants can take turns. Ctrl-C reaches the parent alone.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from fusible.bench.blocks import KINDS, dtype_of, make_inputs
from fusible.bench.load import Load, Turn, check, copies, kept_bytes, module_of, products, timed, variant_load
from fusible.bench.rows import Row
from fusible.demo.worker import without_interrupts
from fusible.sequential import Sequential

__all__ = ["TUNED", "Failure", "Worker"]

#: The environment of a tuned malloc: large blocks too come from the heap, and it is never given back.
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
#: Seconds until the threads of a finished turn have gone to sleep; until then they hold a core, waiting.
REST = 0.01
PROBE_SIZE = 512
PROBE_RUNS = 4
#: Tensors of a row's largest size whose memory is touched before its first call, and a bound of it.
TOUCHED = 16
MOST_TOUCHED = 1 << 30


class Failure(Exception):
    """A variant cannot do what was asked; one line says why."""


class Bench:
    """The child's side: what the parent may ask for."""

    def __init__(self, row: Row, variant: str, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.row = row
        self.matrix = torch.randn(PROBE_SIZE, PROBE_SIZE)
        self.product = torch.empty_like(self.matrix)
        wake_torch()
        touch_memory(row)
        self.module = module_of(row, variant)
        self.load = variant_load(self.module, row)
        self.floor: Load | None = None
        self.zeros: Load | None = None

    def first(self) -> tuple[float, float]:
        """Seconds of the first and the second forward+backward."""
        times = []
        for _ in range(2):
            start = time.perf_counter()
            self.load.both()
            times.append(time.perf_counter() - start)
        return times[0], times[1]

    def check(self) -> str | None:
        """How the block differs from its twin, or `None`."""
        assert isinstance(self.module, Sequential)
        return check(self.module, self.row)

    def kept(self) -> int | None:
        return kept_bytes(self.module, make_inputs(self.row))

    def turn(self) -> Turn:
        return self._turn(self.load)

    def floor_turn(self) -> Turn | None:
        """As a turn of a variant; `None` if the row has no floor."""
        if self.floor is None:
            self.floor = copies(self.row) or products(self.row)
        return None if self.floor is None else self._turn(self.floor)

    def zeros_turn(self) -> Turn:
        if self.zeros is None:
            self.zeros = variant_load(self.module, self.row, zeros=True)
        return self._turn(self.zeros)

    def _turn(self, load: Load) -> Turn:
        before = self._probe()
        forward, both = timed(load.forward) * load.scale[0], timed(load.both) * load.scale[1]
        after = self._probe()
        time.sleep(REST)
        return Turn(forward, both, (before, after))

    def _probe(self) -> float:
        """Seconds of a fixed parallel product; much longer than usual if somebody else holds a core."""
        torch.mm(self.matrix, self.matrix, out=self.product)  # wakes the threads
        start = time.perf_counter()
        for _ in range(PROBE_RUNS):
            torch.mm(self.matrix, self.matrix, out=self.product)
        return time.perf_counter() - start


def wake_torch() -> None:
    """What torch loads and starts on first use is no variant's own first call: a backward with an explicit gradient, as
    the variants are given one, imports half a second's worth of modules."""
    layer = torch.nn.Linear(64, 64)
    out = torch.nn.functional.gelu(layer(torch.randn(64, 64)))
    torch.autograd.grad(out, list(layer.parameters()), torch.ones_like(out))


def touch_memory(row: Row) -> None:
    """Uses as much memory as the row may need and gives it back, so that no variant is the first to use the machine's.

    A virtual machine gets its memory from the host on first use, which is dear. It comes straight from the system, as
    what malloc would keep of it would be a present to the variant with a tuned one.
    """
    largest = row.tokens * max(row.hidden, *(row.width * times for times in KINDS[row.kind].inputs))
    memory = mmap.mmap(-1, min(TOUCHED * largest * dtype_of(row).itemsize, MOST_TOUCHED))
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    memory.close()


@dataclass(frozen=True)
class Failed:
    """The child's answer where the parent gets a `Failure`."""

    error: str


def serve(connection: Connection, row: Row, variant: str, threads: int | None) -> None:
    """The child: answers one question after another, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    try:
        bench: Bench | None = None
        while True:
            question = connection.recv()
            try:
                if bench is None:
                    bench = Bench(row, variant, threads)
                connection.send(None if question == "start" else getattr(bench, question)())
            except (EOFError, ConnectionError):
                raise
            except Exception as error:
                first = next((line for line in str(error).splitlines() if line.strip()), "")
                connection.send(Failed(f"{type(error).__name__}: {first.strip()}"))
    except (EOFError, ConnectionError):
        return


class Worker:
    """The parent's end. Leave it by `with`, which ends the process."""

    def __init__(self, row: Row, variant: str, threads: int | None, environment: dict[str, str]) -> None:
        self.variant = variant
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, row, variant, threads), daemon=True)
        with without_interrupts(), _environment(environment):
            self.process.start()
        theirs.close()
        self.connection.send("start")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()

    def ask(self, question: str) -> Any:
        """Calls a method of the child's `Bench`. Raises `Failure` with the child's error, in one line."""
        self._send(question)
        return self.answer()

    def _send(self, question: str) -> None:
        try:
            self.connection.send(question)
        except (BrokenPipeError, ConnectionError):
            raise self._ended() from None

    def answer(self) -> Any:
        """The answer to the question that is open: at first whether the process is ready."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if isinstance(answer, Failed):
            raise Failure(answer.error)
        return answer

    def _ended(self) -> Failure:
        self.process.join()
        return Failure(f"its process ended by itself, with exit code {self.process.exitcode}")


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Changes the environment that a process started here inherits."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
