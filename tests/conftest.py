"""Shared set-up: this folder is on the path (`import helpers`), and nothing depends on the order of tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# A time limit for each example fails at random on a busy machine; tests that are about time measure it themselves.
settings.register_profile("wavefill", deadline=None)
settings.load_profile("wavefill")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
