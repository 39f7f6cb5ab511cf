"""What a run of the benchmark found, as plain values that go to JSON and come back. Times in milliseconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fusible.bench.rows import FIRST_MS, PEERS, Row, Targets

__all__ = ["Machine", "Report", "RowResult", "Spread", "Timing", "spread"]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of the rounds that counted."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


@dataclass(frozen=True)
class Timing:
    """One variant on one row.

    Attributes:
        forward: with grad mode on.
        both: forward and backward.
        first, second: the first two calls, forward and backward, in a fresh process, after construction.
        kept: bytes kept for backward beside parameters and inputs; `None` if unknown.
        reason: why nothing else is here.
    """

    forward: Spread | None = None
    both: Spread | None = None
    first: float | None = None
    second: float | None = None
    kept: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class RowResult:
    """One row: `status` is "ok", "noisy" (too few quiet rounds: all of them count) or "failed" (`reason` says why).

    Attributes:
        floor: what the memory traffic alone or the matrix products alone take.
        zeros: fusible's best forward+backward on inputs of zeros, and on the usual ones, in turns.
        rounds, rejected: rounds that count, and those left out because the probe found the machine busy.
    """

    row: Row
    status: str = "ok"
    reason: str = ""
    timings: dict[str, Timing] = field(default_factory=dict)
    floor: Timing | None = None
    zeros: tuple[float, float] | None = None
    rounds: int = 0
    rejected: int = 0

    def time(self, variant: str, what: str = "both") -> float | None:
        """Median of `what`, "forward" or "both", in milliseconds; `variant` may be "floor"."""
        timing = self.floor if variant == "floor" else self.timings.get(variant)
        found = None if timing is None else timing.both if what == "both" else timing.forward
        return None if found is None else found.median

    def ratio(self, variant: str, what: str = "both") -> float | None:
        """The variant's time / ours: above 1 we are faster. For "floor": the part of its speed that we reach."""
        peer, ours = self.time(variant, what), self.time("fusible", what)
        return None if peer is None or not ours else peer / ours

    def kept(self, variant: str) -> int | None:
        timing = self.timings.get(variant)
        return None if timing is None else timing.kept

    @property
    def first_excess(self) -> float | None:
        """By how many milliseconds our first call took longer than the second."""
        ours = self.timings.get("fusible", Timing())
        return None if ours.first is None or ours.second is None else ours.first - ours.second

    def misses(self) -> dict[str, str]:
        """Which targets were measured and not reached: what, and its figures in words."""
        found = {}
        for peer in PEERS:
            ratio, target = self.ratio(peer), self.row.targets.of(peer)
            if ratio is not None and target is not None and ratio < target:
                found[peer] = f"{peer} {ratio:.2f}x, target {target:g}x"
        part, target = self.ratio("floor"), self.row.targets.floor
        if part is not None and target is not None and part < target:
            found["floor"] = f"{part:.0%} of the floor, target {target:.0%}"
        if self.first_excess is not None and self.first_excess > FIRST_MS:
            found["first"] = f"first call {self.first_excess:.0f} ms over the second, target {FIRST_MS:g} ms"
        if (text := self._kept_too_much()) is not None:
            found["kept"] = text
        return found

    def _kept_too_much(self) -> str | None:
        ours, eager, compiled, target = (*map(self.kept, ("fusible", "eager", "compile")), self.row.targets.kept)
        if ours is None or target is None:
            return None
        if eager is not None and ours * target > eager:
            return f"keeps {ours} bytes, target 1/{target:g} of eager's {eager}"
        if compiled is not None and ours > compiled:
            return f"keeps {ours} bytes, compile {compiled}"
        return None


@dataclass(frozen=True)
class Machine:
    """Where it ran."""

    fusible: str
    torch: str
    python: str
    platform: str
    cpu: str
    threads: int
    kernels: str
    load: float | None


@dataclass(frozen=True)
class Report:
    """A whole run."""

    machine: Machine
    rows: tuple[RowResult, ...]
    seconds: float

    @property
    def failed(self) -> tuple[RowResult, ...]:
        return tuple(result for result in self.rows if result.status == "failed")

    @property
    def missed(self) -> tuple[RowResult, ...]:
        return tuple(result for result in self.rows if result.misses())

    def to_dict(self) -> dict[str, Any]:
        """As plain values that `json.dumps` takes; each row also with its name, its ratios and its missed targets."""
        plain = asdict(self)
        for result, found in zip(plain["rows"], self.rows, strict=True):
            result["name"] = found.row.name
            result["ratios"] = {peer: found.ratio(peer) for peer in (*PEERS, "floor")}
            result["misses"] = list(found.misses().values())
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Report:
        """The inverse of `to_dict`."""
        return cls(Machine(**plain["machine"]), tuple(map(_result, plain["rows"])), plain["seconds"])


def _result(plain: dict[str, Any]) -> RowResult:
    row = dict(plain["row"], targets=Targets(**plain["row"]["targets"]), variants=tuple(plain["row"]["variants"]))
    floor, zeros = plain["floor"], plain["zeros"]
    return RowResult(
        Row(**row),
        plain["status"],
        plain["reason"],
        {variant: _timing(timing) for variant, timing in plain["timings"].items()},
        None if floor is None else _timing(floor),
        None if zeros is None else (zeros[0], zeros[1]),
        plain["rounds"],
        plain["rejected"],
    )


def _timing(plain: dict[str, Any]) -> Timing:
    spreads = {what: None if plain[what] is None else Spread(**plain[what]) for what in ("forward", "both")}
    return Timing(**{**plain, **spreads})
