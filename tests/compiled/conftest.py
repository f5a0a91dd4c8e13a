"""Every test of captured code starts clean and leaves its thread clean; many share an input."""

import pytest
import torch
from capture_testing import tokens
from engine_testing import clean_thread  # noqa: F401  # around every test here


@pytest.fixture(scope="module")
def x():
    torch.manual_seed(1)
    return tokens()
