"""A feed-forward block with a residual: what runs, what is kept, and a training step.

    python examples/residual_block.py

Its last line is:

loss fell
"""

from __future__ import annotations

import torch

import fusible
from fusible import ops, rules

WIDTH, HIDDEN, ROWS = 64, 176, 32


def main() -> None:
    torch.manual_seed(0)
    block = fusible.Sequential(
        ops.Residual(
            ops.RMSNorm(WIDTH),
            ops.Linear(WIDTH, 2 * HIDDEN, bias=False),
            ops.SwiGLU(),
            ops.Linear(HIDDEN, WIDTH, bias=False),
        ),
    )
    x, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    print(block.explain(x))

    lean = (rules.gated_mlp, *rules.DEFAULT)  # keeps the MLP's input alone, for one more GEMM
    with fusible.use_rules(lean):
        kept = block.explain(x).kept_bytes
    print(f"\nkept for backward: {block.explain(x).kept_bytes} bytes, with gated_mlp {kept} bytes\n")

    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(block(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"first loss {losses[0]:.3f}, last {losses[-1]:.3f}")
    print("loss fell" if losses[-1] < losses[0] else "loss did not fall")


if __name__ == "__main__":
    main()
