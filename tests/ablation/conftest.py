"""A model of the caller's own, where the command line finds it."""

import sys

import pytest
from ablation_testing import OWN


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The current folder, in which ``its_own_model`` has functions that make models, or do not."""
    (tmp_path / "its_own_model.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("its_own_model", None)
