"""A folder that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.atomic_io import fsync_dir
from nsa.checkpoint.weights import SAFETENSORS

if TYPE_CHECKING:
    from torch import Tensor


@contextlib.contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """A draft to write files into; it becomes `to` at the end, and is gone where that fails."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"--to {to}: there is something already; name a new folder")
    given, to = to, Path(os.path.realpath(to))  # "." has no name, and a link is no folder
    if to.exists() and (to.is_mount() or to == Path.cwd()):
        raise ValueError(f"--to {given}: this folder cannot be replaced; name a new one in it")
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        for file in draft.iterdir():
            file.chmod(draft.stat().st_mode & 0o666)  # safetensors: the owner's alone
            with file.open("rb") as written:
                os.fsync(written.fileno())
        fsync_dir(draft)
        draft.replace(to)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    fsync_dir(to.parent)


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """`model.safetensors`; a full disk is an OSError, as with every other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, folder / SAFETENSORS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder.parent}: the weights cannot be written: {error}") from None
