"""The files that a user names: where they are, and writing them as a whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from recompute.errors import RecomputeError, WriteError

PathLike = str | os.PathLike[str]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_path(path: PathLike) -> Path:
    """The path that ``path`` names: a leading ``~`` is the user's home, as no shell reads it in ``--out=~/a``."""
    return Path(os.path.expanduser(path))


def check_writable(path: PathLike, *, error: type[RecomputeError], is_folder: bool = False) -> None:
    """Make the folder to write to, and raise ``error`` where it, or the file in it, cannot be written."""
    path = user_path(path)
    folder = path if is_folder else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if not is_folder and path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
    except OSError as problem:
        kind = "a folder" if is_folder else "a file"
        raise error(f"{path}: expected {kind} that can be written; {problem.strerror or problem}") from problem


def check_new(paths: Iterable[PathLike], *, error: type[RecomputeError], others: str) -> None:
    """Raise ``error`` where writing these files would replace one. others: the options that there are instead."""
    there = [str(path) for path in map(user_path, paths) if path.is_file() and not _is_stream(path)]
    if there:
        is_there = "is there already" if len(there) == 1 else "are there already"
        raise error(f"{', '.join(there)} {is_there}. {others}")


def _is_stream(path: Path) -> bool:
    """Whether this is a pipe, a terminal or ``/dev/stdout``, wherever that goes: no file that another may replace."""
    return path.is_relative_to("/dev") or not (path.is_file() or path.is_dir() or not path.exists())


def png_of(figure: Any) -> bytes:
    """The content of a PNG file of a matplotlib figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def write_file(path: PathLike, content: str | bytes) -> None:
    """Write a file, in a folder that is made. If that fails, what was there stays as it was.

    Raises ``WriteError``, which names the file, the reason, and what to do.
    """
    data = content.encode() if isinstance(content, str) else content
    is_stream = _is_stream(user_path(path))
    path = Path(os.path.realpath(user_path(path)))  # a link stays one
    unfinished = path if is_stream else path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(data)
        if not is_stream:
            os.replace(unfinished, path)
    except OSError as problem:
        if not is_stream:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        what = "Free some space there" if problem.errno in _FULL else "Make it writable"
        raise WriteError(
            f"{path}: cannot be written: {problem.strerror or problem}. {what}, or write to another folder"
        ) from problem
