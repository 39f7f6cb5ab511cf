"""Shipped rules, one file per fused idea, and the sets of them: `DEFAULT`, `LEAN`, `NONE`.

fusible.Sequential(..., rules=(mine, *fusible.rules.DEFAULT))     # earlier rules win
with fusible.use_rules(fusible.rules.NONE): ...                   # nothing fused
"""

from __future__ import annotations

from fusible.rule import RuleSet
from fusible.rules.add_norm import add_norm, linear_add_norm
from fusible.rules.bias_activation import bias_activation
from fusible.rules.gated_mlp import gated_mlp
from fusible.rules.linear_backward import dlinear_add, dlinear_scale
from fusible.rules.linear_epilogue import linear_activation, linear_add, linear_bias, linear_scale_add
from fusible.rules.recompute import activation_linear_recompute
from fusible.rules.residual_norm import dresidual_layer_norm, dresidual_rms_norm

__all__ = [
    "DEFAULT",
    "LEAN",
    "NONE",
    "activation_linear_recompute",
    "add_norm",
    "bias_activation",
    "dlinear_add",
    "dlinear_scale",
    "dresidual_layer_norm",
    "dresidual_rms_norm",
    "gated_mlp",
    "linear_activation",
    "linear_add",
    "linear_add_norm",
    "linear_bias",
    "linear_scale_add",
]

#: No rules: every op runs its own `fwd` and `bwd`.
NONE = RuleSet()

#: What a block uses unless told otherwise; longer patterns first.
DEFAULT = RuleSet(
    (
        linear_add_norm,
        add_norm,
        linear_scale_add,
        linear_activation,
        linear_add,
        linear_bias,
        bias_activation,
        dlinear_add,
        dlinear_scale,
        dresidual_rms_norm,
        dresidual_layer_norm,
    )
)

#: `DEFAULT`, and activations computed again in backward instead of kept. `gated_mlp`, which also computes a GEMM again,
#: is in no set: put it in front of one.
LEAN = RuleSet((activation_linear_recompute,)) + DEFAULT
