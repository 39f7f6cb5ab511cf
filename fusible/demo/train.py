"""Training: from a text and a seed to one loss per step, the same for any model of the same weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusible.demo.config import BATCH, CONTEXT, Config
from fusible.demo.model import MODELS

__all__ = ["Trainer", "Vocabulary", "make_model"]


class Vocabulary:
    """The characters of a text, numbered in sorted order."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        self.index = {character: i for i, character in enumerate(self.characters)}

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.index[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.tolist())


def make_model(variant: str, vocabulary: int, config: Config) -> Any:
    """A model of either variant with the weights that `config.seed` gives the plain one."""
    torch.manual_seed(config.seed)
    weights = MODELS["torch.nn"](vocabulary, config).state_dict()
    model = MODELS[variant](vocabulary, config)
    model.load_state_dict(weights)
    return model


class Trainer:
    """Trains a model with AdamW on random pieces of the text; equal seeds see equal batches.

    Rate, `eps` and clipping keep the training stable: a difference in rounding stays one and does not grow.
    """

    def __init__(self, model: torch.nn.Module, tokens: Tensor, config: Config, rate: float = 3e-3) -> None:
        self.model = model
        self.tokens = tokens
        self.steps = config.steps
        self.rate = rate
        self.done = 0
        self.generator = torch.Generator().manual_seed(config.seed)
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.99), eps=1e-6)

    def step(self) -> float:
        """One training step; returns its loss in nats per character."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * schedule(self.done, self.steps)
        loss = self.model(*self.batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.item()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Characters and the characters that follow them, both `[b, t]`."""
        starts = torch.randint(len(self.tokens) - CONTEXT, (BATCH, 1), generator=self.generator)
        pieces = self.tokens[starts + torch.arange(CONTEXT + 1)]  # [b, t + 1]
        return pieces[:, :-1], pieces[:, 1:]


def schedule(done: int, steps: int) -> float:
    """The learning rate's factor: up over the first twentieth of the steps, then down a half cosine to a tenth."""
    rise = max(1, steps // 20)
    if done < rise:
        return (done + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * (done - rise) / max(1, steps - rise))
