"""Whose code a file is: the folder that it lies in tells, however it is reached."""

import sys
import warnings
from pathlib import Path
from types import FunctionType

import pytest

import recompute
from recompute.errors import warn
from recompute.source_files import lies_in

PACKAGE = str(Path(recompute.__file__).parent)


def test_a_folder_whose_name_begins_alike_is_another(tmp_path):
    folder = str(tmp_path / "torch")
    assert lies_in(f"{folder}/nn/modules/linear.py", "/elsewhere", folder)
    assert not lies_in(f"{folder}vision/ops/misc.py", folder)
    assert not lies_in(f"{folder}.py", folder)


def test_a_file_lies_in_a_folder_by_either_of_its_paths(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for seen in ("real", "link"):
        assert lies_in(str(tmp_path / seen / "model.py"), str(tmp_path / "link"))


KERNELS = [f"{PACKAGE}/kernels", str(Path(PACKAGE, "kernels").resolve())]
"""As a checkout on the path names it, and as an editable install does."""


@pytest.mark.parametrize("folder", [f"{PACKAGE}/attach", *KERNELS], ids=["attach", "kernels", "what kernels leads to"])
def test_a_warning_points_past_the_files_of_this_package(folder):
    assert warned_of(in_file(f"{folder}/some.py", calls_warn)) == __file__


@pytest.mark.parametrize("folder", [f"{PACKAGE}_experiments", f"{KERNELS[1]}_of_mine"])
def test_a_warning_points_at_code_beside_this_package(folder):
    assert warned_of(in_file(f"{folder}/some.py", calls_warn)) == f"{folder}/some.py"


def calls_warn():
    warn("said")


def in_file(filename, function):
    return FunctionType(function.__code__.replace(co_filename=filename), sys.modules[__name__].__dict__)


def warned_of(function):
    """The file that a warning names."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return caught[0].filename
