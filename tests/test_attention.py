"""Attention, rotary positions and embeddings beyond what a row can say: random weights, gradients of masks, borders,
scaling rules of another library, tied weights, errors by value, one plan for every length."""

from __future__ import annotations

import math
import re
import sys
from itertools import pairwise

import pytest
import torch
from rows import F64, FLOATS
from rows import attention as elementary

import fusible
from fusible import kernels, ops, rules
from fusible.ops import rotary
from fusible.testing import check, check_op

F32, BF16 = torch.float32, torch.bfloat16


def ran(block, x, *extras, **named):
    """y and the gradient of x."""
    x = x.detach().clone().requires_grad_()
    y = block(x, *extras, **named)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y).cumsum(-2))[0]


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("borders", [False, True])
def test_dropout(dtype, borders):
    """No row: a formula cannot draw the same weights. One mask in both passes, in double backward, and by seed."""
    torch.manual_seed(2)
    op = ops.Attention(4, 2, causal=True, dropout=0.4, cu_seqlens="c" if borders else None)
    x, extra = torch.randn(2, 5, 16).to(dtype), [torch.tensor([0, 3, 5])] if borders else []
    check_op(op, x, *extra, gradcheck=dtype is F64)
    block = fusible.Sequential(op, inputs=("c",) if borders else ())
    named = {"c": extra[0]} if borders else {}
    torch.manual_seed(3)
    first = block(x, **named)
    assert not torch.equal(first, block(x, **named))
    torch.manual_seed(3)
    assert torch.equal(first, block(x, **named))
    op.eval()
    assert torch.equal(block(x, **named), block(x, **named))


def test_dropout_keeps_the_mean():
    """No row: an average over many draws."""
    op = ops.Attention(1, dropout=0.5)
    x = torch.randn(1, 4, 6, dtype=F64).expand(4000, 4, 6)
    torch.manual_seed(4)
    mean = fusible.Sequential(op)(x).mean(0)
    assert (mean - op.eval()(x[0])).abs().max() < 0.1


@pytest.mark.parametrize("shape", [(5, 5), (1, 5), (5, 1), (3, 1, 5), (2, 1, 1, 5), (2, 4, 5, 5), (5,)], ids=str)
@pytest.mark.parametrize("kind", ["bools", "floats", "learned"])
def test_masks_of_every_shape(shape, kind):
    """No row: shapes that broadcast; a learned mask gets its gradient."""
    if shape[0] == 3:
        shape = (4, 1, 5)
    torch.manual_seed(5)
    mask = torch.rand(shape) > 0.3 if kind == "bools" else torch.randn(shape, dtype=F64)
    x = torch.randn(2, 5, 16, dtype=F64)
    op = ops.Attention(4, 2, mask="m", causal=True)
    block = fusible.Sequential(op, inputs=("m",))
    if kind != "learned":
        right = ran(lambda x, m: elementary(op, x, whole(m)), x, m=mask)
        for mine, other in zip(ran(block, x, m=mask), right, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
        return
    check(block, x, m=mask, layouts=False, gradcheck=True)


def whole(mask):
    """A mask with its two last dimensions, as the elementary formula asks for."""
    return mask.expand(*mask.shape[:-2], 5, 5) if mask.dim() > 1 else mask.expand(5, 5)


def test_more_leading_dimensions_than_one():
    """No row: a mask with leading dimensions of its own."""
    x = torch.randn(2, 3, 5, 16, dtype=F64)
    op = ops.Attention(4, 2, mask="m")
    for mask in (torch.randn(2, 1, 1, 5, 5), torch.randn(3, 4, 5, 5), torch.randn(2, 3, 4, 5, 5), torch.randn(1, 5)):
        check(fusible.Sequential(op, inputs=("m",)), x, m=mask.double(), layouts=False)


def test_a_query_that_sees_nothing_gives_zero():
    """No row: NaN is what must not come; padding at the end, and a row of its own."""
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, 2], mask[1, :, :, 3:] = False, False
    x = torch.randn(2, 5, 12)
    for m in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
        for options in ({}, {"soft_cap": 5.0}):
            block = fusible.Sequential(ops.Attention(2, mask="m", **options), inputs=("m",))
            y, dx = ran(block, x, m=m)
            assert (y[0, 2] == 0).all()
            assert y.isfinite().all()
            assert dx.isfinite().all()
            assert (dx[1, 3:, 4:] == 0).all()  # keys and values that nobody sees


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 3}, {"window": 40}, {}], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_packed_sequences_are_sequences(options, kv_heads):
    """Each sequence between two borders gives what it gives alone; long ones, in several pieces where there is a
    window."""
    torch.manual_seed(6)
    borders = torch.tensor([0, 150, 150, 151, 440], dtype=torch.int32)
    x = torch.randn(440, 8 * (4 + 2 * kv_heads), dtype=F64)
    op = ops.Attention(4, kv_heads, **options)
    alone = fusible.Sequential(op)
    parts = [ran(alone, x[a:b]) for a, b in pairwise(borders) if a < b]
    packed = fusible.Sequential(ops.Attention(4, kv_heads, cu_seqlens="c", **options), inputs=("c",))
    leaf = x.clone().requires_grad_()
    y = packed(leaf, c=borders)
    grads = torch.cat([torch.ones(int(b - a), y.shape[-1], dtype=F64).cumsum(-2) for a, b in
                       pairwise(borders)])  # fmt: skip
    (dx,) = torch.autograd.grad(y, leaf, grads)
    torch.testing.assert_close(y, torch.cat([y for y, _ in parts]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dx, torch.cat([d for _, d in parts]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"causal": True, "window": 150}, {"window": 70}, {"soft_cap": 3.0}], ids=str)
def test_in_pieces_as_whole(options, monkeypatch):
    """No row: rows are short. Longer than a piece, against all scores at once."""
    monkeypatch.setattr(sys.modules["fusible.kernels.attention"], "MAX_SCORES", 1)  # 16 queries at a time
    x = torch.randn(2, 330, 32, dtype=F64)
    op = ops.Attention(4, 2, **options)
    for mine, right in zip(ran(fusible.Sequential(op), x), ran(lambda x: elementary(op, x), x), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "x", "named", "error", "text"),
    [
        (lambda: ops.Attention(4, 3), None, {}, ValueError,
         "heads must be a multiple of kv_heads, both positive, got 4 and 3"),
        (lambda: ops.Attention(4, window=0), None, {}, ValueError,
         "window must be at least 1, the place itself, got 0"),
        (lambda: ops.Attention(4, dropout=1), None, {}, ValueError, "dropout must be at least 0 and below 1, got 1"),
        (lambda: ops.Attention(4, soft_cap=0), None, {}, ValueError, "soft_cap must be positive, got 0; leave it out"),
        (lambda: ops.Rotary(7, 2), None, {}, ValueError,
         "head_dim must be even, since pairs are rotated, and at most head_dim=7, got 7"),
        (lambda: ops.Rotary(8, 2, rotary_dim=10), None, {}, ValueError, "rotary_dim must be even"),
        (lambda: ops.Rotary(8, 0), None, {}, ValueError, "head_dim and heads must be positive, got 8 and 0"),
        (lambda: ops.Rotary(8, 2, scaling={"rope_type": "longrope"}), None, {}, ValueError,
         "scaling: rope_type must be one of linear, dynamic, yarn, llama3, got 'longrope'"),
        (lambda: ops.Rotary(8, 2, scaling={"rope_type": "yarn", "factor": 2}), None, {}, ValueError,
         "scaling: rope_type 'yarn' needs original_max_position_embeddings"),
        (lambda: ops.Rotary(8, 2, scaling={"rope_type": "linear", "factor": 2, "beta": 1}), None, {}, ValueError,
         "scaling: rope_type 'linear' has no option 'beta'; take it out"),
        (lambda: ops.Rotary(8, 2, scaling={"rope_type": "linear", "factor": 0.5}), None, {}, ValueError,
         "scaling: factor must be at least 1, got 0.5"),
        (lambda: ops.Rotary(8, 2, positions="p", scaling={"rope_type": "dynamic", "factor": 2,
         "original_max_position_embeddings": 4}), None, {}, ValueError,
         "scaling: rope_type 'dynamic' depends on the length of x; leave positions out"),
        (lambda: ops.Attention(2, mask="m"), (2, 5, 12), {"m": torch.ones(2, 5)}, ValueError,
         "Attention (op 0): mask must broadcast to [2, 2, 5, 5], [..., heads, t, t], but has shape [2, 5] "
         "(x: [2, 5, 12])"),
        (lambda: ops.Attention(2, mask="m"), (5, 12), {"m": torch.ones(1, 2, 5, 5)}, ValueError,
         "Attention (op 0): mask must broadcast to [2, 5, 5]"),
        (lambda: ops.Attention(2, mask="m"), (5, 12), {"m": torch.ones(5, 5, dtype=torch.int64)}, ValueError,
         "Attention (op 0): mask must be bools or floats, got torch.int64; convert it, with bool()"),
        (lambda: ops.Attention(2, cu_seqlens="c"), (5, 12), {"c": torch.ones(5)}, ValueError,
         "Attention (op 0): cu_seqlens must be int32 or int64 of shape [n + 1] for n sequences, got torch.float32"),
        (lambda: ops.Attention(2, cu_seqlens="c"), (5, 12), {"c": torch.tensor([0, 3])}, ValueError,
         "Attention: cu_seqlens must begin with 0, not fall, and end with the length 5, got [0, 3]"),
        (lambda: ops.Attention(2, cu_seqlens="c"), (5, 12), {"c": torch.tensor([0, 4, 3, 5])}, ValueError,
         "Attention: cu_seqlens must begin with 0, not fall, and end with the length 5, got [0, 4, 3, 5]"),
        (lambda: ops.Rotary(6, 2, positions="p"), (2, 5, 12), {"p": torch.zeros(2, dtype=torch.int64)}, ValueError,
         "Rotary (op 0): positions must have shape [5] or [2, 5], one for each place of x, but have [2] "
         "(x: [2, 5, 12])"),
        (lambda: ops.Rotary(6, 2, positions="p"), (2, 5, 12), {"p": torch.zeros(5)}, ValueError,
         "Rotary (op 0): positions must have dtype int64 or int32, got torch.float32; convert them with long()"),
        (lambda: ops.Rotary(6, 2, positions="p"), (2, 5, 12), {"p": torch.tensor([0, 1, 2, -1, 0])}, ValueError,
         "Rotary: positions must not be negative, got -1"),
        (lambda: ops.PositionEmbedding(7, 4, positions="p"), (2, 4), {"p": torch.tensor([0, 7])}, IndexError,
         "PositionEmbedding: positions must be from 0 to 6, got 7"),
        (lambda: ops.PositionEmbedding(7, 4, positions="p"), (2, 4), {"p": torch.tensor([0, -2])}, IndexError,
         "PositionEmbedding: positions must be from 0 to 6, got -2"),
    ],
)  # fmt: skip
@pytest.mark.quick
def test_errors_by_their_text(make, x, named, error, text):
    """No row: a row's errors are those of x's shape."""
    with pytest.raises(error, match=re.escape(text)):
        fusible.Sequential(make(), inputs=named)(torch.ones(x or (1, 5, 12)), **named)


@pytest.mark.quick
def test_twenty_lengths_one_plan():
    """Tokens, positions, mask and borders of any length."""
    block = fusible.Sequential(
        ops.Embedding(9, 8), ops.PositionEmbedding(40, 8, positions="p"), ops.Linear(8, 16),
        ops.Rotary(4, 3, positions="p"), ops.Attention(2, 1, mask="m", cu_seqlens="c"), ops.Linear(8, 8),
        inputs=("p", "m", "c"),
    )  # fmt: skip
    for t in range(1, 21):
        tokens, named = torch.zeros(2, t, dtype=torch.int64), {
            "p": torch.arange(t), "m": torch.zeros(2, t, t), "c": torch.tensor([0, *range(1, t), t])}  # fmt: skip
        block(tokens, **named).sum().backward()
        fuser, _ = block.single_chain(tokens, **named)
    assert len(fuser.plans) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # torch's own
def test_transforms():
    """The plain formulas under `vmap`, `jacrev` and double backward; an op alone."""
    op = ops.Attention(2, 1, causal=True)
    block = fusible.Sequential(ops.Rotary(4, 3), op).double()
    x = torch.randn(3, 5, 16, dtype=F64, requires_grad=True)
    torch.testing.assert_close(torch.func.vmap(block)(x), block(x))
    jacobian = torch.func.jacrev(lambda x: block(x).sum(0))(x[0].detach())
    assert jacobian.shape == (8, 5, 16)
    hessian = torch.func.hessian(lambda x: block(x).square().sum())(x[0].detach())
    assert hessian.isfinite().all()
    assert torch.autograd.gradgradcheck(block, x, fast_mode=True)


# -- rotary ------------------------------------------------------------------------------------------------------------

SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2,
     "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"] if s else "none")
def test_frequencies_are_those_of_transformers(scaling):
    """No row: against another library's figures, where it is installed."""
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    config_class = pytest.importorskip("transformers").LlamaConfig
    length = 40
    known = (scaling or {}).get("original_max_position_embeddings", length)
    parameters = {"rope_theta": 10000.0, "rope_type": "default", **(scaling or {})}
    config = config_class(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=known, rope_parameters=parameters
    )
    mine, factor = rotary._frequencies(16, 10000.0, scaling, length)
    if scaling is None:
        right, right_factor = 10000.0 ** (-torch.arange(0, 16, 2) / 16), 1.0
    else:
        right, right_factor = modeling.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)
    torch.testing.assert_close(torch.tensor(mine), right, rtol=1e-5, atol=0)
    assert math.isclose(factor, right_factor, rel_tol=1e-6)


@pytest.mark.parametrize("scaling", [s for s in SCALINGS if s], ids=lambda s: s["rope_type"])
def test_scaled_rotary(scaling):
    check_op(ops.Rotary(8, 2, scaling=scaling), torch.randn(2, 20, 24, dtype=F64), gradcheck=False)


def test_a_position_far_out_is_exact():
    """No row: angles of float32 would be off by a hundredth."""
    x = torch.randn(1, 4, dtype=F32)
    at = torch.tensor([200_000])
    y = fusible.Sequential(ops.Rotary(4, 1, positions="p"), inputs=("p",))(x, p=at)
    angles = 200_000 * torch.tensor([1.0, 0.01], dtype=F64)
    a, b = x.double().chunk(2, -1)
    right = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
    torch.testing.assert_close(y.double(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.quick
def test_tables_are_shared_and_grow():
    """No row: what is kept between calls."""
    rotary._tables.clear()
    layers = [fusible.Sequential(ops.Rotary(4, 2, base=77.0)) for _ in range(3)]
    with torch.inference_mode():
        layers[0](torch.randn(5, 8))
    for layer in layers:
        layer(torch.randn(6, 8, requires_grad=True)).sum().backward()
    assert [len(table) for table in rotary._tables.values()] == [8]
    layers[0](torch.randn(9, 8))
    assert [len(table) for table in rotary._tables.values()] == [16]
    str(layers[0].explain(torch.randn(700, 8)))
    assert [len(table) for table in rotary._tables.values()] == [16]


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_rotary_and_attention_fused(positions, dtype):
    """No row: longer than the rules' cases, with positions for each row and grouped heads."""
    torch.manual_seed(8)
    names = ("p",) if positions else ()
    named = {"p": torch.randint(0, 50, (2, 3, 17))} if positions else {}
    chain = [ops.Rotary(6, 5, positions="p" if positions else None, rotary_dim=4), ops.Attention(4, 2, causal=True)]
    x = torch.randn(2, 3, 17, 48).to(dtype)
    block = fusible.Sequential(*chain, inputs=names, rules=(rules.dattention_rotary,))
    assert "dattention_rotary" in str(block.explain(x.requires_grad_(), **named))
    check(block, x, **named)


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_padding_gets_no_gradient():
    """No row: finite differences do not know of it."""
    tokens = torch.tensor([[2, 1, 2], [0, 2, 6]])
    block = fusible.Sequential(ops.Embedding(7, 4, padding_idx=2).double())
    check(block, tokens)
    block(tokens).sum().backward()
    assert block[0].weight.grad[:, 0].tolist() == [1, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("rules_", [rules.DEFAULT, rules.NONE], ids=["default", "none"])
def test_tied_weights_add_their_gradients_up(rules_):
    """No row: one parameter in two ops."""
    embedding, head = ops.Embedding(7, 4), ops.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    block = fusible.Sequential(embedding, ops.Tanh(), head, rules=rules_).double()
    tokens = torch.tensor([[1, 2, 6], [0, 2, 2]])
    check(block, tokens, gradcheck=True)
    weight = block[0].weight.detach().clone().requires_grad_()
    torch.manual_seed(9)
    dy = torch.randn(2, 3, 7, dtype=F64)
    (right,) = torch.autograd.grad(torch.tanh(weight[tokens]) @ weight.T, weight, dy)
    (mine,) = torch.autograd.grad(block(tokens), block[0].weight, dy)
    torch.testing.assert_close(mine, right)


@pytest.mark.quick
@pytest.mark.parametrize("bad", [7, -1])
def test_tokens_out_of_range(bad):
    with pytest.raises(IndexError, match=f"Embedding: x must be from 0 to 6, got {bad}"):
        fusible.Sequential(ops.Embedding(7, 4))(torch.tensor([1, bad]))


@pytest.mark.quick
@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_that_torch_runs(options):
    """No row: they decline, with the option's name."""
    block = fusible.Sequential(ops.Embedding(7, 4, **options), ops.Tanh())
    tokens = torch.tensor([1, 2, 2])
    twin = torch.nn.Embedding(7, 4, **options)
    twin.load_state_dict(block[0].state_dict())
    assert torch.equal(block(tokens), torch.tanh(twin(tokens)))
    assert f"Embedding with {next(iter(options))} runs as torch.nn.Embedding does it" in str(block.explain(tokens))


def test_many_equal_tokens_in_bfloat16():
    """No row: 3000 gradients of one row, whose sum stands still in bfloat16."""
    block = fusible.Sequential(ops.Embedding(3, 4).to(BF16))
    block(torch.ones(3000, dtype=torch.int64)).sum().backward()
    assert block[0].weight.grad[1].tolist() == [torch.tensor(3000.0).bfloat16()] * 4


@pytest.mark.quick
def test_explain_without_x_for_tokens():
    """An embedding in front: tokens are made up."""
    text = str(fusible.Sequential(ops.Embedding(7, 16), ops.Rotary(4, 3), ops.Attention(2, 1)).explain())
    assert "x [1, 1] int64" in text
    assert "x [1, 16] float32" in str(fusible.Sequential(ops.Linear(16, 16), ops.Attention(2, 1)).explain())


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head", "turned"), [(300, 300), (6, 4), (2, 2)])
def test_kernels_of_rotary_are_their_plain_bodies(dtype, interleaved, head, turned):
    """No row: each backend's bodies, with heads wider than a tile, rows apart and a table for each row."""
    torch.manual_seed(10)
    wide_ = F64 if dtype is F64 else F32
    shapes = [(7, turned), (3, 7, turned)]
    x = torch.randn(3, 7, 5 * head + 4).to(dtype)[..., : 5 * head]
    q, k, v = x.unflatten(-1, (5, head)).split((2, 1, 2), -2)
    for shape in shapes:
        angles = torch.randn(*shape[:-1], turned // 2, dtype=wide_)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        for inverse in (False, True):
            mine = kernels.rotate(x, table, 4, head, interleaved, inverse)
            close(mine, kernels.rotate.body(x, table, 4, head, interleaved, inverse))
        written = x.contiguous()
        assert kernels.rotate_(written, table, 4, head, interleaved) is written
        close(written, kernels.rotate_.body(x.contiguous(), table, 4, head, interleaved))
        mine = kernels.unrotate_pack(q, k, v, table, 3, interleaved)
        close(mine, kernels.unrotate_pack.body(q, k, v, table, 3, interleaved))
    assert torch.equal(kernels.pack(q, k, v), x)
    there = kernels.rotate(x, table, 4, head, interleaved).unflatten(-1, (5, head)).split((2, 1, 2), -2)
    back = kernels.unrotate_pack(*there, table, 4, interleaved)
    torch.testing.assert_close(back, x, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def close(mine, right):
    """Within a rounding of the other's last digit: a product may be fused with the sum."""
    eps = torch.finfo(mine.dtype).eps
    torch.testing.assert_close(mine, right, rtol=2 * eps, atol=4 * eps)
