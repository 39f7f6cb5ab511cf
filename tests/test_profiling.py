"""`fusible.profile`: what it times, what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import fusible
from fusible import executable, ops


def block() -> fusible.Sequential:
    return fusible.Sequential(ops.RMSNorm(64), ops.Linear(64, 32), ops.GELU())


@pytest.mark.quick
def test_steps_of_both_passes_with_their_bytes():
    x = torch.randn(100, 64, requires_grad=True)
    made, explained = fusible.profile(block(), x, rounds=2), block().explain(x).parts[0]
    forward = [step for step in made.steps if step.direction == "forward"]
    backward = [step for step in made.steps if step.direction == "backward"]
    for steps, rows in ((forward, explained.forward), (backward, explained.backward)):
        assert [(s.ops, s.rule, s.kernels) for s in steps] == [(r.ops, r.rule, r.kernels) for r in rows]
    norm = forward[0]
    assert norm.bytes == 4 * (2 * 100 * 64 + 64 + 100)  # x, y, weight, rstd
    assert norm.copies == pytest.approx(norm.seconds * made.copy_rate / norm.bytes)
    assert all(step.copies is None for step in made.steps if "BasicLinear" in step.ops)
    assert made.forward > 0
    assert made.backward > 0
    assert made.overhead == pytest.approx(made.forward + made.backward - sum(s.seconds for s in made.steps))


@pytest.mark.quick
def test_without_gradients_there_is_no_backward():
    with torch.no_grad():
        made = fusible.profile(block(), torch.randn(3, 64), rounds=1)
    assert {step.direction for step in made.steps} == {"forward"}
    assert made.backward == 0


@pytest.mark.quick
def test_it_shows_as_text_as_a_table_and_as_data():
    made = fusible.profile(block(), torch.randn(3, 64), rounds=1)
    lines = str(made).splitlines()
    assert lines[0] == made.title
    assert lines[2].split() == ["pass", "ops", "rule", "kernels", "time", "share", "bytes", "copies"]
    assert lines[-3].split()[:2] == ["the", "block"]
    assert made._repr_html_().count("<tr>") == len(made.steps) + 3
    assert json.loads(json.dumps(made.to_dict()))["overhead"] == made.overhead


@pytest.mark.quick
def test_nothing_is_left_behind(monkeypatch):
    monkeypatch.setattr(executable, "CHECK_ALWAYS", False)
    profiled, x = block(), torch.randn(3, 64, requires_grad=True)
    before = profiled(x)
    fusible.profile(profiled, x, rounds=1)
    assert executable.CHECK_ALWAYS is False
    assert executable.OBSERVE is None
    assert torch.equal(profiled(x), before)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in profiled.parameters())


@pytest.mark.quick
def test_what_cannot_be_profiled():
    split = fusible.Sequential(ops.Linear(4, 4), torch.nn.Softplus())
    with pytest.raises(ValueError, match=r"^Sequential is more than one chain; print\(block.explain\(x\)\) shows what"):
        fusible.profile(split, torch.randn(3, 4))
    with pytest.raises(ValueError, match="^profile: rounds must be at least 1, got 0$"):
        fusible.profile(block(), torch.randn(3, 64), rounds=0)


def test_it_is_loaded_when_it_is_asked_for():
    names = "('fusible.profiling', 'fusible.auditing', 'rich', 'matplotlib')"
    code = f"import sys, fusible; print([n for n in {names} if n in sys.modules], fusible.profile, fusible.audit)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("[] <function profile")
