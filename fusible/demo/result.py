"""What the two trainings gave, and what it comes to."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from fusible.demo.worker import Step

__all__ = ["AGREE", "Result", "Run"]

#: In nats per character: above rounding, which training may amplify, and below what a wrong gradient would do.
AGREE = 0.01


@dataclass
class Run:
    """One variant's training, as far as it came."""

    variant: str
    tokens_per_step: int
    steps: list[Step] = field(default_factory=list)
    peak: int | None = None

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return len(self.steps) * self.tokens_per_step / self.seconds

    @property
    def milliseconds(self) -> float:
        """The median step's."""
        return 1e3 * median(step.seconds for step in self.steps)

    @property
    def peak_mib(self) -> float | None:
        return None if self.peak is None else self.peak / 2**20


@dataclass
class Result:
    """Both trainings. What compares them looks at the steps that both have done."""

    plain: Run
    fused: Run

    @property
    def runs(self) -> tuple[Run, Run]:
        return self.plain, self.fused

    @property
    def common(self) -> int:
        """How many steps both have done."""
        return min(len(run.steps) for run in self.runs)

    def losses(self) -> tuple[list[float], list[float]]:
        plain, fused = ([step.loss for step in run.steps[: self.common]] for run in self.runs)
        return plain, fused

    def largest_difference(self) -> tuple[float, int]:
        """The largest difference of the two losses, NaN if one is NaN, and the step (from 1) where it stands."""
        differences = [abs(f - p) for p, f in zip(*self.losses(), strict=True)]
        worst = max(range(len(differences)), key=lambda i: (differences[i] != differences[i], differences[i]))
        return differences[worst], worst + 1

    def agrees(self) -> bool:
        """Whether the two curves are the same but for rounding; NaN is not."""
        return self.largest_difference()[0] <= AGREE

    def write_losses(self, path: Path) -> None:
        """Writes one line per step as CSV: its number and the loss of each variant, in nats per character."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *(run.variant for run in self.runs)])
            writer.writerows([i + 1, *pair] for i, pair in enumerate(zip(*self.losses(), strict=True)))
