"""Each family of models that `fuse` knows: the same training run in float64, structure, and back again.

A row of `rows.py` would not do: these are other people's models. They are skipped where `transformers` is not
installed.
"""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

import fusible
from fusible import adapting, fused
from fusible.bench.families import FAMILIES, GATED, Size

TRANSFORMERS = importlib.util.find_spec("transformers") is not None
NEEDS = pytest.mark.skipif(not TRANSFORMERS, reason="transformers is not installed; pip install fusible[models]")
ALL = [pytest.param(name, marks=[] if name.startswith("torch") else NEEDS) for name in FAMILIES]
SIZE = Size(16, 24, 2, 4, 20)
#: Modules that run fused, of two layers.
COUNTS = {"qwen3": 7, "gemma3": 7, "gpt2": 2, "gpt_neox": 2, "gpt_neox, one by one": 2, "bert": 5, "vit": 2}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model, stock, and a copy of it, fused."""
    torch.manual_seed(0)
    stock = FAMILIES[name].make(SIZE).to(dtype)
    m = copy.deepcopy(stock)
    report = fusible.fuse(m)
    assert not report.declined + report.partial, str(report)
    assert len(report.fused) == COUNTS.get(name, 3), str(report)
    return stock, m


def running(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [inner for inner in model.modules() if adapting.PLAIN in type(inner).__dict__]


@pytest.mark.parametrize("name", ALL)
def test_a_training_run_is_the_same_and_undone(name):
    stock, m = pair(name)
    family = FAMILIES[name]
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (stock, m)]
    for seed in range(4):
        losses = []
        for each, optimizer in zip((stock, m), optimizers, strict=True):
            loss = family.loss(each, 2, 9, seed)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], abs=1e-8)
    for (path, a), (_, b) in zip(stock.named_parameters(), m.named_parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8, msg=lambda text, path=path: f"{path}: {text}")
    assert all(fused._fusion(inner).forward is not None for inner in running(m))
    fusible.unfuse(m)
    assert [type(inner) for inner in m.modules()] == [type(inner) for inner in stock.modules()]
    stock.load_state_dict(m.state_dict())
    assert torch.equal(family.loss(m, 2, 9), family.loss(stock, 2, 9))


@pytest.mark.parametrize("name", ALL)
def test_float32_is_as_near_to_float64_as_stock(name):
    stock, m = pair(name, torch.float32)
    family = FAMILIES[name]

    def results(model: torch.nn.Module) -> list[torch.Tensor]:
        loss = family.loss(model, 2, 9)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]

    truth = results(copy.deepcopy(stock).double())
    for want, theirs, ours in zip(truth, results(stock), results(m), strict=True):
        scale = want.abs().max().item()
        error = (theirs - want).abs().max().item()
        assert (ours - want).abs().max().item() <= 2 * error + 4e-7 * scale


@NEEDS
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_bfloat16_rounds_where_the_model_rounds(name):
    stock, m = pair(name, torch.bfloat16)
    family = FAMILIES[name]
    truth = family.loss(copy.deepcopy(stock).double(), 2, 9).item()
    theirs, ours = (family.loss(each, 2, 9).item() for each in (stock, m))
    assert abs(ours - truth) <= 2 * abs(theirs - truth) + 1e-2


@NEEDS
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_norms_round_as_their_model_does(name):
    torch.manual_seed(0)
    stock = FAMILIES[name].make(SIZE).model.norm
    torch.nn.init.normal_(stock.weight)
    m = copy.deepcopy(stock)
    fusible.fuse(m, strict=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(5, 16).to(dtype)
        assert torch.equal(m.to(dtype)(x), stock.to(dtype)(x)), dtype


@NEEDS
def test_generation_with_a_cache_gives_the_same_tokens():
    stock, m = pair("llama")
    tokens = torch.arange(6).reshape(2, 3)
    outs = [each.eval().generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0) for each in (stock, m)]
    assert torch.equal(*outs)


@NEEDS
def test_hidden_states_and_attentions_are_captured():
    stock, m = pair("llama")
    tokens = torch.arange(6).reshape(2, 3)
    outs = [each(tokens, output_hidden_states=True) for each in (stock, m)]
    assert len(outs[1].hidden_states) == len(outs[0].hidden_states)
    for a, b in zip(*(out.hidden_states for out in outs), strict=True):
        torch.testing.assert_close(b, a)


@NEEDS
def test_gradient_checkpointing_gives_the_same_gradients():
    stock, m = pair("llama")
    for reentrant in (False, True):
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        grads = []
        for each in (stock, m):
            each.train()
            each.zero_grad()
            FAMILIES["llama"].loss(each, 2, 9).backward()
            grads.append([parameter.grad for parameter in each.parameters()])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-8, atol=1e-8)


@NEEDS
def test_layers_whose_mlp_is_none_of_ours_are_fused_around_it():
    torch.manual_seed(0)
    stock = FAMILIES["llama"].make(SIZE).double()
    m = copy.deepcopy(stock)
    seen = []
    for each in (stock, m):
        each.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    report = fusible.fuse(m)
    assert [row.path for row in report.partial] == ["model.layers.0"]
    assert [row.path for row in report.declined] == ["model.layers.0.mlp"]
    losses = [FAMILIES["llama"].loss(each, 2, 9) for each in (stock, m)]
    assert len(seen) == 2
    torch.testing.assert_close(*losses)


@NEEDS
def test_importing_fusible_imports_no_transformers():
    import subprocess
    import sys

    code = "import sys, fusible; fusible.fuse, fusible.unfuse, fusible.adapter; " \
           "import torch; fusible.fuse(torch.nn.Linear(2, 2)); assert 'transformers' not in sys.modules"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gated_families_share_one_pass_over_the_input():
    if not TRANSFORMERS:
        pytest.skip("transformers is not installed; pip install fusible[models]")
    for name in set(GATED) - {"phi3"}:
        _, m = pair(name)
        layer = m.model.layers[0]
        text = str(fusible.chains(layer)[1].explain(torch.randn(3, 16), torch.randn(3, 16)))
        assert "PairLinear" in text, name


@NEEDS
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt2", "gpt_neox"])
def test_a_layer_called_by_hand(name):
    """Arguments by position, by their old names, and left out."""
    stock, m = pair(name)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    rotary = torch.randn(2, 1, 5, 4, dtype=torch.float64)
    outs = []
    for each in (stock, m):
        layers = {"gpt2": lambda each=each: each.transformer.h, "gpt_neox": lambda each=each: each.gpt_neox.layers}
        layer = layers.get(name, lambda each=each: each.model.layers)()[0]
        mask = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
        mask[..., 3:] = -torch.inf
        position = {} if name == "gpt2" else {"position_embeddings": (rotary[0], rotary[1])}
        outs.append([layer(x, **position), layer(x, attention_mask=mask, **position)])
        if name == "llama":
            outs[-1].append(layer(x, mask, None, None, False, (rotary[0], rotary[1])))
            outs[-1].append(layer(x, past_key_values=None, **position))
    torch.testing.assert_close(outs[1], outs[0])
