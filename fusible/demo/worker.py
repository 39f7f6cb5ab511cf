"""Each variant trains in a process of its own, so that its memory can be told from the other's.

The parent asks for one step at a time. It can therefore let the two take turns (a busy spell of the machine then slows
both), and Ctrl-C stops them between two steps: it reaches the parent alone, and the children obey the parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fusible.demo.config import Config
from fusible.demo.train import Trainer, Vocabulary, make_model

__all__ = ["Failed", "Finished", "Step", "Worker", "WorkerError"]

#: Steps before the clock starts: they load libraries, fill caches, and make fusible's plans once.
WARM_UP = 3


@dataclass(frozen=True)
class Step:
    """One training step: its loss in nats per character, and how long it took."""

    loss: float
    seconds: float


@dataclass(frozen=True)
class Finished:
    """The end of a training: by how many bytes it raised the process's memory, or `None` where nobody can say."""

    peak: int | None


@dataclass(frozen=True)
class Failed:
    """The training raised this error."""

    error: str


class WorkerError(Exception):
    """A training process failed."""


class Worker:
    """The parent's end of one training process. Leave it by `with`, which ends the process."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, variant), daemon=True)
        with without_interrupts():
            self.process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.join()

    def prepare(self, config: Config, text: str) -> None:
        """Returns when the process has warmed up and is ready for its first step."""
        self._ask((config, text))

    def step(self) -> Step:
        """Trains for one step."""
        answer = self._ask("step")
        assert isinstance(answer, Step)
        return answer

    def finish(self, weights: Path | None) -> Finished:
        """Ends the training, saves its weights, and returns what was measured."""
        answer = self._ask(weights)
        assert isinstance(answer, Finished)
        return answer

    def _ask(self, request: object) -> object:
        try:
            self.connection.send(request)
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise WorkerError(
                f"{self.variant}: the training process ended by itself, with exit code {self.process.exitcode}"
            ) from None
        if isinstance(answer, Failed):
            raise WorkerError(f"{self.variant}: {answer.error}")
        return answer


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Holds Ctrl-C back. A process that starts here inherits that: a terminal's Ctrl-C is for the parent alone."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # starting it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(connection: Connection, variant: str) -> None:
    """The child: trains, one step per request, until asked to finish or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for Windows, which cannot hold signals back
    try:
        config, text = connection.recv()
        vocabulary = Vocabulary(text)
        tokens = vocabulary.encode(text)
        load_libraries(variant)
        memory = PeakMemory()
        warm_up(variant, len(vocabulary), tokens, config)
        trainer = Trainer(make_model(variant, len(vocabulary), config), tokens, config)
        connection.send("ready")
        while (request := connection.recv()) == "step":
            start = time.perf_counter()
            loss = trainer.step()
            connection.send(Step(loss, time.perf_counter() - start))
        if request is not None:
            save(trainer.model, request)
        connection.send(Finished(memory.peak()))
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        connection.send(Failed(f"{type(error).__name__}: {first}"))


def save(model: torch.nn.Module, path: Path) -> None:
    """Writes the state dict, all of it or nothing."""
    part = path.with_name(path.name + ".part")
    torch.save(model.state_dict(), part)
    os.replace(part, path)


def load_libraries(variant: str) -> None:
    """Trains a tiny model for a step: what torch loads and starts on first use is no variant's own memory."""
    tiny = Config(steps=1, width=8, layers=1, heads=1)
    tokens = torch.arange(1000) % 7
    Trainer(make_model(variant, 7, tiny), tokens, tiny).step()


def warm_up(variant: str, vocabulary: int, tokens: torch.Tensor, config: Config) -> None:
    """Trains a model of full size for a few steps, and throws it away."""
    trainer = Trainer(make_model(variant, vocabulary, config), tokens, config)
    for _ in range(WARM_UP):
        trainer.step()


class PeakMemory:
    """By how many bytes this process's resident memory has exceeded, at its highest, what it is now.

    On Linux from the kernel's high-water mark, which is reset first; on macOS from the highest value since the process
    began; `None` elsewhere, and where the mark cannot be reset.
    """

    def __init__(self) -> None:
        self.start = self._reset()

    def peak(self) -> int | None:
        now = high_water()
        return None if self.start is None or now is None else max(0, now - self.start)

    @staticmethod
    def _reset() -> int | None:
        if os.path.exists("/proc/self/clear_refs"):
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                return None
        return high_water()


def high_water() -> int | None:
    """The highest resident memory of this process, in bytes."""
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
