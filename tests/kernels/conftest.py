"""How the tests of norms choose what a kernel's programs do, and see what is launched."""

import pytest

from recompute.kernels import launch, norm_tiles


@pytest.fixture(autouse=True)
def plans_of_this_test():
    """Eager calls make plans anew, as tests change what is launched."""
    for plans in launch.PLANS.values():
        plans.by_layouts.clear()


@pytest.fixture(params=["rows", "columns"])
def form(request, monkeypatch):
    """Tiles of whole rows, or blocks of the columns of rows that are taken for wide ones."""
    if request.param == "columns":
        for name, programs in (("FORWARD", 0), ("BACKWARD", 1), ("LAYER_NORM_BACKWARD", 1)):
            monkeypatch.setattr(norm_tiles, name, {norm_tiles.WIDE: norm_tiles.TileSettings(2, 4, 3, programs)})
        monkeypatch.setattr(norm_tiles, "WIDE_BLOCK", 128)
    norm_tiles.tiles_of.cache_clear()
    yield request.param
    norm_tiles.tiles_of.cache_clear()


@pytest.fixture(params=[1, 8])
def multiprocessors(request, monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: request.param)
    return request.param


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched, and their arguments by name."""
    launched = []
    launch_kernel = launch.run

    def spy(kernel, programs, *arguments, **settings):
        launched.append((kernel, dict(zip(kernel.arg_names, arguments, strict=False))))
        launch_kernel(kernel, programs, *arguments, **settings)

    monkeypatch.setattr(launch, "run", spy)
    return launched
