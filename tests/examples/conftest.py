"""How tests run an example, and import the modules of a sweep."""

import importlib
import runpy
import sys

import pytest
from sweep_testing import EXAMPLES


@pytest.fixture
def part(request, monkeypatch):
    """Imports a module of a sweep, as its script does: the test's ``FOLDERS`` are on the path."""
    for folder in request.module.FOLDERS:
        monkeypatch.syspath_prepend(EXAMPLES / folder)
    return importlib.import_module


@pytest.fixture
def output_of(monkeypatch, capsys):
    """Runs an example, and returns what it prints."""

    def run(name, *arguments):
        for folder in ("losses", "adapters"):
            monkeypatch.syspath_prepend(EXAMPLES / folder)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run
