"""What freezing and unused outputs save: gradients that nobody wants are not computed, and what they read is not kept.

    python examples/freezing_and_outputs.py

Its last line is:

head got no gradient
"""

from __future__ import annotations

import torch

import fusible
from fusible import ops


def main() -> None:
    torch.manual_seed(0)
    block = fusible.Sequential(
        ops.Linear(32, 64),
        ops.GELU(),
        ops.MakeExtraOutput("features", keep=True),  # used below and handed out as well
        ops.Linear(64, 64),
        ops.AddExtraInput("features"),
        torch.nn.Linear(64, 10),
    )
    x = torch.randn(16, 32)
    print("all trained:  ", block.explain(x).kept_bytes, "bytes kept")

    for layer in (block[0], block[3]):
        layer.requires_grad_(False)
    print("head alone:   ", block.explain(x).kept_bytes, "bytes kept")
    with torch.no_grad():
        print("inference:    ", block.explain(x).kept_bytes, "bytes kept")

    block.requires_grad_(True)
    logits, features = block(x)
    print("\noutputs:", tuple(logits.shape), tuple(features.shape))
    features.square().mean().backward()  # the logits are not used
    assert block[0].weight.grad is not None
    print("head got no gradient" if block[5].weight.grad is None else "head got a gradient")


if __name__ == "__main__":
    main()
