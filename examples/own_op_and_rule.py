"""An op and a rule of your own, each in ten lines, each with its proof.

    python examples/own_op_and_rule.py

Its last line is:

softcap_scale ran
"""

from __future__ import annotations

import torch

import fusible
from fusible import Grads, Op, Out, Saved, forward, ops
from fusible.testing import check_op, check_rule


class SoftCap(Op):
    """`y = cap tanh(x / cap)`: keeps values within ±cap."""

    aliases = grad_aliases = False

    class Saved(Saved):
        t: torch.Tensor

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def reference(self, x):
        return self.cap * torch.tanh(x / self.cap)

    def fwd(self, x):
        t = torch.tanh(x / self.cap)
        return Out(t * self.cap, saved=SoftCap.Saved(t))

    def bwd(self, saved, dy):
        return Grads(dy * (1 - saved.t * saved.t))


@forward
def softcap_scale(cap: SoftCap, scale: ops.ConstantScale, /, x):
    """Both factors in one multiplication."""
    t = torch.tanh(x / cap.cap)
    y = t * (cap.cap * scale.scale)
    return Out(y, cap=SoftCap.Saved(t), scale=ops.ConstantScale.Saved(scale.scale))


def main() -> None:
    torch.manual_seed(0)
    check_op(SoftCap(3.0), torch.randn(5, 8))
    check_rule(softcap_scale, [ops.Linear(8, 8), SoftCap(3.0), ops.ConstantScale(0.5)], torch.randn(5, 8))
    print("op and rule are right\n")

    block = fusible.Sequential(
        ops.Linear(8, 8), SoftCap(3.0), ops.ConstantScale(0.5), rules=(softcap_scale, *fusible.rules.DEFAULT)
    )
    explanation = block.explain()
    print(explanation)
    ran = [row.rule for row in explanation.parts[0].forward]
    print("\nsoftcap_scale ran" if "softcap_scale" in ran else "\nsoftcap_scale did not run")


if __name__ == "__main__":
    main()
