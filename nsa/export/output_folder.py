"""Output folder of import and export, which appears complete or not at all; weight files."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nsa.atomic_io import fsync_dir
from nsa.checkpoint.weights import SAFETENSORS


@contextlib.contextmanager
def output_folder(to: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to `to` at the end, or delete it after an error."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"--to {to}: already exists; name a new folder")
    given, to = to, Path(os.path.realpath(to))  # resolves "." and links
    if to.exists() and (to.is_mount() or to == Path.cwd()):
        raise ValueError(f"--to {given}: cannot be replaced; name a new folder inside it")
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        for file in draft.iterdir():
            file.chmod(draft.stat().st_mode & 0o666)  # safetensors restricts its file to the owner
            with file.open("rb") as written:
                os.fsync(written.fileno())
        fsync_dir(draft)
        draft.replace(to)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    fsync_dir(to.parent)


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write model.safetensors; raise OSError if the disk is full, as for other files."""
    try:
        save_file(weights, folder / SAFETENSORS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder.parent}: the weights cannot be written: {error}") from None
