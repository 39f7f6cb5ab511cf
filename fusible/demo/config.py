"""The options of the demo, checked where they are made, and the text that it trains on."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BATCH", "CONTEXT", "Config", "InputError", "read_text"]

#: Sequences per step, and characters per sequence.
BATCH = 16
CONTEXT = 64


class InputError(Exception):
    """What the user gave cannot work; the text is one line that says what to do."""


@dataclass(frozen=True)
class Config:
    """Size and length of the training. Raises `InputError` on values that cannot work."""

    steps: int = 600
    width: int = 128
    layers: int = 4
    heads: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "width", "layers", "heads"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"--{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed must be between 0 and 2^63 - 1, got {self.seed}")
        if self.width % self.heads:
            nearest = (self.width // self.heads + 1) * self.heads
            raise InputError(
                f"--width must be a multiple of --heads, got {self.width} and {self.heads}; try --width {nearest}"
            )

    @property
    def tokens_per_step(self) -> int:
        return BATCH * CONTEXT


def read_text(path: Path | None) -> str:
    """The text of a file, or the manual pages of the Python language, which come with every Python.

    Raises `InputError` if the file cannot be read, is not UTF-8, or is too short to cut a sequence from.
    """
    if path is None:
        return "\n".join(pydoc_data.topics.topics.values())
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--text {path}: must be UTF-8 text, got byte {error.start} that is not") from None
    except OSError as error:
        raise InputError(f"--text {path}: {error.strerror or error}") from None
    if len(text) <= CONTEXT:
        raise InputError(f"--text {path}: must have more than {CONTEXT} characters, got {len(text)}")
    return text
