"""The workloads and what each must reach: one row each. Sizes are tokens (rows) x width; times are forward+backward."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fusible.demo.config import InputError

__all__ = ["FIRST_MS", "PEERS", "ROWS", "VARIANTS", "Row", "Targets", "select", "sweep"]

#: fusible, and what it is compared with: eager as installed, eager with a tuned malloc, torch.compile as installed.
PEERS = ("eager", "tuned", "compile")
VARIANTS = ("fusible", *PEERS)

#: The first forward+backward of a block may take this much longer than the second, in milliseconds.
FIRST_MS = 20.0


@dataclass(frozen=True)
class Targets:
    """Peer's time / ours, at least; `floor` is the part of the floor's speed; `kept` is eager's kept bytes / ours.

    Where `kept` is given, ours may not be more than the compiled twin's either. `None`: no target.
    """

    eager: float | None = None
    tuned: float | None = None
    compile: float | None = None
    floor: float | None = None
    kept: float | None = None

    def of(self, peer: str) -> float | None:
        """The target against one of `PEERS`."""
        return {"eager": self.eager, "tuned": self.tuned, "compile": self.compile}[peer]


@dataclass(frozen=True)
class Row:
    """One workload: a kind of block (`blocks.KINDS`) at one size and dtype."""

    group: str
    kind: str
    tokens: int
    width: int
    hidden: int = 0
    dtype: str = "float32"
    targets: Targets = Targets()
    variants: tuple[str, ...] = VARIANTS

    @property
    def name(self) -> str:
        sizes = f"{self.kind}-{self.tokens}x{self.width}"
        return sizes if self.dtype == "float32" else f"{sizes}-{self.dtype}"

    def matches(self, pattern: str) -> bool:
        """Whether a word of the command line means this row: its kind, its group, or its name as a shell pattern."""
        return pattern in (self.kind, self.group) or fnmatchcase(self.name, pattern)


_NORM = Targets(15, 4, 4, 0.65)
_LAYER_NORM = Targets(3, 1.0, 3, 0.60)
_BIAS_GELU = Targets(5, 1.2, 4)
_SMALL_MLP = Targets(1.25, 1.25, 1.25, kept=2)

ROWS: tuple[Row, ...] = (
    Row("large", "rmsnorm", 4096, 2048, targets=_NORM),
    Row("large", "add-rmsnorm", 4096, 2048, targets=_NORM),
    Row("large", "layernorm", 4096, 2048, targets=_LAYER_NORM),
    Row("large", "add-layernorm", 4096, 2048, targets=_LAYER_NORM),
    Row("large", "swiglu", 4096, 2048, targets=Targets(8, 2, 4, 0.80)),
    Row("large", "bias-gelu", 4096, 2048, targets=_BIAS_GELU),
    Row("large", "bias-gelu-tanh", 4096, 2048, targets=_BIAS_GELU),
    Row("large", "dropout-add-layernorm", 4096, 2048, targets=Targets(8, 4, 8)),
    Row("small", "rmsnorm", 512, 1024, targets=Targets(8, 8, 2)),
    Row("small", "swiglu", 512, 1024, targets=Targets(4, 4, 2)),
    Row("small", "rmsnorm", 64, 256, targets=Targets(1.5, 1.5, 2)),
    Row("small", "swiglu", 64, 256, targets=Targets(1.5, 1.5, 2)),
    Row("mlps", "mlp", 16, 64, 256, targets=_SMALL_MLP),
    Row("mlps", "mlp", 64, 128, 512, targets=_SMALL_MLP),
    Row("mlps", "mlp", 256, 256, 1024, targets=Targets(1.15, 1.15, 1.15, kept=2)),
    Row("mlps", "mlp", 1024, 512, 2048, targets=Targets(1.1, 1.0, 1.0, 0.92, kept=2)),
    Row("mlps", "mlp", 4096, 1024, 4096, targets=Targets(1.15, 1.05, 1.0, 0.92, kept=2)),
    Row("mlps", "gated-mlp", 2048, 512, 1376, targets=Targets(1.15, 1.1, 0.98, 0.93, kept=2)),
    Row("half", "mlp", 512, 512, 2048, "float16", Targets(eager=20), ("fusible", "eager")),
    Row("half", "mlp", 512, 512, 2048, "bfloat16", Targets(eager=2), ("fusible", "eager")),
)

SWEEP_WIDTHS = (64, 256, 1024, 4096)
SWEEP_TOKENS = (1, 16, 256, 4096, 16384)
#: An MLP of the sweep has at most this many multiply-adds in its six products, which is seconds of eager bfloat16.
SWEEP_WORK = 2**37


def sweep() -> tuple[Row, ...]:
    """The grid of sizes on which no block may be slower than eager, beside noise."""
    rows = [
        Row("sweep", kind, tokens, width, 4 * width if kind == "mlp" else 0, dtype, Targets(eager=0.97), VARIANTS[:2])
        for kind in ("rmsnorm", "swiglu", "mlp")
        for dtype in ("float32", "bfloat16")
        for width in SWEEP_WIDTHS
        for tokens in SWEEP_TOKENS
    ]
    return tuple(row for row in rows if 6 * row.tokens * row.width * row.hidden <= SWEEP_WORK)


def select(words: Iterable[str], rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows that any of these words means, in the table's order; all of them if there are no words.

    Raises `InputError` on a word that means none.
    """
    words = tuple(words)
    for word in words:
        if not any(row.matches(word) for row in rows):
            known = [*dict.fromkeys(row.kind for row in rows), *dict.fromkeys(row.group for row in rows)]
            close = difflib.get_close_matches(word, [*known, *(row.name for row in rows)], 1)
            meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise InputError(f"ROWS: no row, kind or group is called {word!r}; {meant}")
    return tuple(row for row in rows if not words or any(row.matches(word) for word in words))
