"""Kernels: functions on tensors, each with a plain torch body, by family.

Read the bodies first: they are the formulas. `use` forces a backend, `kernels.rms_norm` and the others are called like
functions.
"""

from __future__ import annotations

from fusible.kernels import library
from fusible.kernels.activation import (
    dbias,
    dgelu,
    dqgelu,
    drelu,
    dsigmoid,
    dsilu,
    dsrelu,
    dtanh,
    gelu,
    gelu_,
    qgelu,
    qgelu_,
    relu,
    relu_,
    sigmoid,
    sigmoid_,
    silu,
    silu_,
    srelu,
    srelu_,
    tanh,
    tanh_,
)
from fusible.kernels.add_norm import add_layer_norm, add_rms_norm, dlayer_norm_add, drms_norm_add
from fusible.kernels.dropout import ddropout, dropout
from fusible.kernels.epilogue import dgemm_x_add, gemm_add, gemm_bias, gemm_scale, gemm_scale_add
from fusible.kernels.gated import (
    clamped_swiglu,
    dclamped_swiglu,
    dgeglu,
    dglu,
    dqgeglu,
    dreglu,
    dsitu_glu,
    dsreglu,
    dswiglu,
    geglu,
    glu,
    qgeglu,
    reglu,
    situ_glu,
    sreglu,
    swiglu,
)
from fusible.kernels.linear import dgemm_weight, dgemm_x, gemm
from fusible.kernels.norm import dl2_norm, dlayer_norm, drms_norm, l2_norm, layer_norm, rms_norm
from fusible.kernels.registry import use
from fusible.kernels.residual import add

__all__ = [
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "clamped_swiglu",
    "dbias",
    "dclamped_swiglu",
    "ddropout",
    "dgeglu",
    "dgelu",
    "dgemm_weight",
    "dgemm_x",
    "dgemm_x_add",
    "dglu",
    "dl2_norm",
    "dlayer_norm",
    "dlayer_norm_add",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "drms_norm",
    "drms_norm_add",
    "dropout",
    "dsigmoid",
    "dsilu",
    "dsitu_glu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "dtanh",
    "geglu",
    "gelu",
    "gelu_",
    "gemm",
    "gemm_add",
    "gemm_bias",
    "gemm_scale",
    "gemm_scale_add",
    "glu",
    "l2_norm",
    "layer_norm",
    "qgeglu",
    "qgelu",
    "qgelu_",
    "reglu",
    "relu",
    "relu_",
    "rms_norm",
    "sigmoid",
    "sigmoid_",
    "silu",
    "silu_",
    "situ_glu",
    "sreglu",
    "srelu",
    "srelu_",
    "swiglu",
    "tanh",
    "tanh_",
    "use",
]

if library.built():
    from fusible.kernels import cpu  # noqa: F401 - registers its bodies
