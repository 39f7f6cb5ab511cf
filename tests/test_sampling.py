"""Sampling with a key-value cache: the logits of the whole chain, token by token, and of its weights as they are."""

from __future__ import annotations

import pytest
import torch

import fusible
from fusible import ops
from fusible.sampling import Sampler

V, D = 11, 16


def decoder(head=None, positions=True, **attention) -> fusible.Sequential:
    torch.manual_seed(0)
    layers = [
        ops.Residual(
            ops.RMSNorm(D), ops.Linear(D, 32), ops.QKNorm(8, 2, 1), ops.Rotary(8, 3),
            ops.Attention(2, 1, causal=True, **attention), ops.Linear(D, D), ops.Dropout(0.1),
        ),
        ops.Residual(ops.LayerNorm(D), ops.Linear(D, 2 * D), ops.GELU(), ops.Linear(2 * D, D)),
    ]  # fmt: skip
    learned = [ops.PositionEmbedding(32, D)] if positions else []
    end = [ops.LinearCrossEntropy(D, V, soft_cap=3.0)] if head is None else head
    return fusible.Sequential(ops.Embedding(V, D), *learned, *layers, *layers, ops.RMSNorm(D), *end).double()


def whole(chain, tokens) -> torch.Tensor:
    """The logits of every place by one run of the chain."""
    chain.eval()
    head = chain[-1]
    if isinstance(head, ops.Linear):
        return chain(tokens)
    x = chain[:-1](tokens)
    if isinstance(head, ops.CrossEntropy):
        return x
    return head.soft_cap * torch.tanh(x @ head.weight.T / head.soft_cap)


@pytest.mark.parametrize("attention", [{}, {"window": 3}, {"soft_cap": 2.0}, {"scale": 0.7}])
@pytest.mark.parametrize("head", ["loss", "logits", "two ops"])
def test_token_by_token_as_all_at_once(head, attention):
    ends = {"loss": None, "logits": [ops.Linear(D, V)], "two ops": [ops.Linear(D, V), ops.CrossEntropy()]}
    chain = decoder(ends[head], **attention)
    tokens = torch.randint(V, (2, 9))
    right = whole(chain, tokens)
    sampler = Sampler(chain)
    got = [sampler(tokens[:, :4]), *[sampler(tokens[:, at : at + 1]) for at in range(4, 7)], sampler(tokens[:, 7:])]
    for place, logits in zip((3, 4, 5, 6, 8), got, strict=True):
        torch.testing.assert_close(logits, right[:, place], rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        chain[0].weight.mul_(2)  # shared, not copied
    sampler.reset()
    chain.train()  # and yet without dropout
    torch.testing.assert_close(sampler(tokens), whole(chain, tokens)[:, -1], rtol=1e-10, atol=1e-10)


@pytest.mark.quick
def test_likeliest_tokens_and_a_context_that_rolls():
    chain = decoder(positions=False).eval()
    tokens = torch.tensor([[1, 2, 3]])
    drawn = Sampler(chain).generate(tokens, 12, temperature=0)
    for at in range(3, 15):
        assert drawn[0, at] == whole(chain, drawn[:, :at])[0, -1].argmax()
    sampler = Sampler(chain)
    rolled = sampler.generate(tokens, 12, temperature=0, context=6)
    assert sampler.length <= 6
    assert torch.equal(rolled[0, :7], drawn[0, :7])
    assert rolled[0, 7] == whole(chain, rolled[:, 4:7])[0, -1].argmax()
    seeds = [sampler.generate(tokens, 12, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])


@pytest.mark.quick
def test_what_cannot_be_sampled_says_why():
    with pytest.raises(ValueError, match=r"^Attention \(op 0\.1\): sampling needs causal attention"):
        Sampler(fusible.Sequential(ops.Residual(ops.SiLU(), ops.Attention(2))))
    with pytest.raises(TypeError, match=r"^AddExtraInput \(op 1\): sampling cannot serve extra inputs and outputs"):
        Sampler(fusible.Sequential(ops.Embedding(V, D), ops.AddExtraInput()))
    sampler = Sampler(decoder())
    with pytest.raises(ValueError, match=r"^Sampler: tokens must be \[sequences, at least one\], got \[3\]$"):
        sampler(torch.tensor([1, 2, 3]))
    with pytest.raises(IndexError):  # beyond the learned positions
        sampler(torch.zeros(1, 33, dtype=torch.long))


@pytest.mark.quick
def test_nothing_of_the_chain_changes():
    chain = decoder()
    before = {name: tensor.clone() for name, tensor in chain.state_dict().items()}
    Sampler(chain).generate(torch.tensor([[1]]), 5)
    assert chain.training
    for name, tensor in chain.state_dict().items():
        assert torch.equal(tensor, before[name])
