"""Shared set-up: this folder is on the path (`import helpers`), and nothing depends on the order of tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
