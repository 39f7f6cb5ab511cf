"""What every test runs under: checked plans, NaN-filled fresh memory, one thread, a fixed seed."""

from __future__ import annotations

import pytest
import torch

import fusible.executable
from fusible import calibration
from fusible.kernels import library
from fusible.kernels.dropout import same_masks


def pytest_addoption(parser):
    parser.addoption(
        "--update-plans", action="store_true", help="write tests/plans/*.txt instead of comparing with them"
    )


@pytest.fixture(autouse=True)
def strict():
    """Each run of each plan is checked, fresh uninitialised memory holds NaN, and formulas draw the kernels' masks."""
    fusible.executable.CHECK_ALWAYS = True
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if library.load():
        torch.ops.fusible.set_fill(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with same_masks(), calibration.use(None):  # a developer's own calibration must not decide what is printed
        yield
    fusible.executable.CHECK_ALWAYS = False
    torch.use_deterministic_algorithms(False)
    if library.load():
        torch.ops.fusible.set_fill(False)
