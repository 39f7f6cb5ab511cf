"""One row at a time: its variants take turns, round by round, and rounds in which the machine was busy do not count."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusible.bench.blocks import KINDS
from fusible.bench.load import Turn
from fusible.bench.results import RowResult, Timing, spread
from fusible.bench.rows import VARIANTS, Row
from fusible.bench.worker import TUNED, Failure, Worker

__all__ = ["Plan", "Probe", "Round", "measure", "play"]

#: A probe that takes this many times its own best found the machine busy.
BUSY = 1.5
#: Rounds that a row needs to count as measured in quiet.
ENOUGH = 3
#: A row ends once it has this many seconds of rounds and enough quiet ones; and after `PATIENCE` times as many anyway.
SECONDS = 5.0
PATIENCE = 6


@dataclass(frozen=True)
class Plan:
    """How rows are measured.

    Attributes:
        rounds: quiet ones per row, at most.
        threads: of each process; `None` leaves torch its own number.
        variants: those to be measured, fusible and eager among them.
        compile_cache: folder for compiled code, empty at first; "" leaves torch its own.
    """

    rounds: int = 10
    threads: int | None = None
    variants: tuple[str, ...] = VARIANTS
    compile_cache: str = ""


class Probe:
    """Judges how long a fixed piece of work took by the best time that it ever had."""

    def __init__(self, busy: float = BUSY) -> None:
        self.busy = busy
        self.best = float("inf")

    def see(self, times: Sequence[float]) -> None:
        self.best = min(self.best, *times)

    def quiet(self, times: Sequence[float]) -> bool:
        """Whether none of these times shows another process on a core, by the best time seen until now."""
        return all(t <= self.busy * self.best for t in times)


@dataclass(frozen=True)
class Round:
    """One turn of each variant."""

    turns: Mapping[str, Turn]

    @property
    def probes(self) -> tuple[float, ...]:
        return tuple(t for turn in self.turns.values() for t in turn.probes)


class Played(NamedTuple):
    """The rounds that count, how many the probe rejected, and whether it were so many that all of them count."""

    rounds: list[Round]
    rejected: int
    noisy: bool


def play(
    turns: Mapping[str, Callable[[], Turn]], probe: Probe, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Played:
    """Plays rounds until `rounds` of them were quiet, or `SECONDS` are over and `ENOUGH` were.

    Gives up after three times `rounds`, or much longer than `SECONDS`. A better time of the probe judges earlier rounds
    anew.
    """
    played: list[Round] = []
    start, enough = clock(), min(ENOUGH, rounds)
    while True:
        order = list(turns) if len(played) % 2 == 0 else list(turns)[::-1]
        played.append(Round({variant: turns[variant]() for variant in order}))
        probe.see(played[-1].probes)
        quiet = [one for one in played if probe.quiet(one.probes)]
        spent = clock() - start
        done = len(quiet) >= rounds or (spent >= SECONDS and len(quiet) >= enough)
        hopeless = len(played) >= 3 * rounds or (spent >= PATIENCE * SECONDS and len(played) >= 2 * enough)
        if done or hopeless:
            noisy = len(quiet) < enough
            return Played(played if noisy else quiet, len(played) - len(quiet), noisy)


def measure(row: Row, plan: Plan, probe: Probe, stage: Callable[[str], None] = lambda what: None) -> RowResult:
    """Measures one row; `stage` is told what is being done. A failure of fusible or of eager fails the row."""
    wanted = [variant for variant in row.variants if variant in plan.variants]
    timings = {variant: Timing(reason="not asked for") for variant in row.variants if variant not in wanted}
    with ExitStack() as stack:
        stage("starting")
        workers = {}
        for variant in wanted:
            if (reason := _cannot(variant)) is not None:
                timings[variant] = Timing(reason=reason)
                continue
            workers[variant] = stack.enter_context(Worker(row, variant, plan.threads, _environment(variant, plan)))
        try:
            firsts = _first_calls(workers, timings, stage)
            stage("checking")
            wrong = workers["fusible"].ask("check")
            if wrong is not None:
                return RowResult(row, "failed", wrong, timings)
            stage("timing")
            return _measure(row, plan, probe, workers, firsts, timings)
        except Failure as error:
            return RowResult(row, "failed", str(error), timings)


def _first_calls(
    workers: dict[str, Worker], timings: dict[str, Timing], stage: Callable[[str], None]
) -> dict[str, tuple[float, float]]:
    """Seconds of the first two calls. A peer that cannot run leaves `workers`, with its reason in `timings`."""
    found = {}
    ready = []
    for variant, worker in list(workers.items()):
        try:
            worker.answer()
            ready.append(variant)
        except Failure as error:
            _drop(variant, error, workers, timings)
    for variant in ready:
        stage("compiling" if variant == "compile" else "first calls")
        try:
            found[variant] = workers[variant].ask("first")
        except Failure as error:
            _drop(variant, error, workers, timings)
    return found


def _drop(variant: str, error: Failure, workers: dict[str, Worker], timings: dict[str, Timing]) -> None:
    if variant in ("fusible", "eager"):
        raise Failure(f"{variant}: {error}") from None
    timings[variant] = Timing(reason=str(error))
    del workers[variant]


def _measure(
    row: Row,
    plan: Plan,
    probe: Probe,
    workers: dict[str, Worker],
    firsts: dict[str, tuple[float, float]],
    timings: dict[str, Timing],
) -> RowResult:
    turns: dict[str, Callable[[], Turn]] = {variant: _asking(worker, "turn") for variant, worker in workers.items()}
    host = workers.get("tuned", workers["eager"])
    if "tuned" in row.variants and host.ask("floor_turn") is not None:
        turns["floor"] = _asking(host, "floor_turn")
    rounds, rejected, noisy = play(turns, probe, plan.rounds)
    zeros = _zeros(workers["fusible"]) if KINDS[row.kind].activation else None
    for variant, worker in workers.items():
        first, second = firsts[variant]
        timings[variant] = _timing([one.turns[variant] for one in rounds], 1e3 * first, 1e3 * second, _kept(worker))
    return RowResult(
        row,
        "noisy" if noisy else "ok",
        f"the machine was busy in {rejected} of {len(rounds)} rounds; all of them count" if noisy else "",
        {variant: timings[variant] for variant in VARIANTS if variant in timings},
        _timing([one.turns["floor"] for one in rounds]) if "floor" in turns else None,
        zeros,
        len(rounds),
        rejected,
    )


def _asking(worker: Worker, question: str) -> Callable[[], Any]:
    return lambda: worker.ask(question)


def _timing(
    turns: Sequence[Turn], first: float | None = None, second: float | None = None, kept: int | None = None
) -> Timing:
    forward, both = spread([1e3 * turn.forward for turn in turns]), spread([1e3 * turn.both for turn in turns])
    return Timing(forward, both, first, second, kept)


def _zeros(worker: Worker) -> tuple[float, float]:
    """The best of a few turns on zeros, and of as many on the usual inputs, in milliseconds."""
    pairs = [(worker.ask("zeros_turn").both, worker.ask("turn").both) for _ in range(ENOUGH)]
    return 1e3 * min(zeros for zeros, _ in pairs), 1e3 * min(usual for _, usual in pairs)


def _kept(worker: Worker) -> int | None:
    try:
        return worker.ask("kept")
    except Failure:
        return None


def _environment(variant: str, plan: Plan) -> dict[str, str]:
    if variant == "tuned":
        return TUNED
    return {"TORCHINDUCTOR_CACHE_DIR": plan.compile_cache} if variant == "compile" and plan.compile_cache else {}


def _cannot(variant: str) -> str | None:
    if variant == "tuned" and platform.libc_ver()[0] != "glibc":
        return "only glibc's malloc can be tuned like this"
    return None
