"""Shipped rules, one file per fused idea, and the sets of them: `DEFAULT`, `LEAN`, `NONE`.

fusible.Sequential(..., rules=(mine, *fusible.rules.DEFAULT))     # earlier rules win
with fusible.use_rules(fusible.rules.NONE): ...                   # nothing fused
"""

from __future__ import annotations

from fusible.rule import RuleSet
from fusible.rules.add_norm import add_norm, linear_add_norm
from fusible.rules.bias_activation import bias_act, bias_activation
from fusible.rules.dropout_add_norm import ddropout_add_norm, dropout_add, dropout_add_norm
from fusible.rules.gated_mlp import gated_mlp
from fusible.rules.linear_backward import dlinear_add, dlinear_scale
from fusible.rules.linear_epilogue import linear_activation, linear_add, linear_bias, linear_scale_add
from fusible.rules.linear_loss import linear_cross_entropy
from fusible.rules.pair import norm_pair_onepass, norm_pair_recompute
from fusible.rules.recompute import (
    activation_linear_onepass,
    activation_linear_recompute,
    norm_linear_onepass,
    norm_linear_recompute,
)
from fusible.rules.residual_norm import dresidual_layer_norm, dresidual_rms_norm
from fusible.rules.rotary import dattention_rotary, linear_rotary

__all__ = [
    "DEFAULT",
    "LEAN",
    "NONE",
    "activation_linear_onepass",
    "activation_linear_recompute",
    "add_norm",
    "bias_act",
    "bias_activation",
    "dattention_rotary",
    "ddropout_add_norm",
    "dlinear_add",
    "dlinear_scale",
    "dresidual_layer_norm",
    "dresidual_rms_norm",
    "dropout_add",
    "dropout_add_norm",
    "gated_mlp",
    "linear_activation",
    "linear_add",
    "linear_add_norm",
    "linear_bias",
    "linear_cross_entropy",
    "linear_rotary",
    "linear_scale_add",
    "norm_linear_onepass",
    "norm_linear_recompute",
    "norm_pair_onepass",
    "norm_pair_recompute",
]

#: No rules: every op runs its own `fwd` and `bwd`.
NONE = RuleSet()

#: What a block uses unless told otherwise; longer patterns first.
DEFAULT = RuleSet(
    (
        linear_cross_entropy,
        linear_add_norm,
        dropout_add_norm,
        dropout_add,
        add_norm,
        linear_scale_add,
        linear_activation,
        linear_rotary,
        linear_add,
        linear_bias,
        bias_act,
        activation_linear_onepass,
        norm_linear_onepass,
        norm_pair_onepass,
        bias_activation,
        dattention_rotary,
        ddropout_add_norm,
        dlinear_add,
        dlinear_scale,
        dresidual_rms_norm,
        dresidual_layer_norm,
    )
)

#: `DEFAULT`, and the outputs of activations and norms computed again in backward instead of kept, also where that takes
#: a pass of its own. `gated_mlp`, which computes a GEMM again, is in no set: put it in front of one.
LEAN = RuleSet((activation_linear_recompute, norm_linear_recompute, norm_pair_recompute)) + DEFAULT
