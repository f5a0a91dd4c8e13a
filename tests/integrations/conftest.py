"""Two processes for the tests that need them, started once."""

import pytest


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory):
    from two_processes import TwoProcesses

    processes = TwoProcesses(tmp_path_factory.mktemp("processes"))
    yield processes
    processes.close()
