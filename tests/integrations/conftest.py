"""Two processes for the tests that need them, started once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from two_processes import TwoProcesses

    processes = TwoProcesses(tmp_path_factory.mktemp("processes"))
    yield processes
    processes.close()
