"""What the tests of the sweeps over architectures and workloads import their modules by."""

import importlib

import pytest
from sweep_testing import EXAMPLES


@pytest.fixture
def part(request, monkeypatch):
    """Imports a module of a sweep, as its script does: the test's ``FOLDERS`` are on the path."""
    for folder in request.module.FOLDERS:
        monkeypatch.syspath_prepend(EXAMPLES / folder)
    return importlib.import_module
