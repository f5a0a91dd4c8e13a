"""Whose code a source file is, by the folder that it lies in."""

from __future__ import annotations

import functools
import os

PACKAGE = os.path.dirname(__file__)
OURS = (PACKAGE, os.path.join(PACKAGE, "kernels"))
"""The folders of this package's code. In a checkout ``kernels`` is a link to a folder that is not inside the other."""


def lies_in(filename: str, *folders: str) -> bool:
    """Whether a code object's file lies in one of the folders, however deep.

    ``site-packages/torchvision/io.py`` does not lie in ``site-packages/torch``.
    """
    return filename.startswith(_beginnings(folders))


@functools.cache
def _beginnings(folders: tuple[str, ...]) -> tuple[str, ...]:
    """What the files of these folders begin with: the path as it is given, and the one that links in it lead to."""
    return tuple(os.path.join(find(folder), "") for folder in folders for find in (os.path.abspath, os.path.realpath))
