"""Adapters for encoders of `transformers`: BERT and ViT."""

from __future__ import annotations
