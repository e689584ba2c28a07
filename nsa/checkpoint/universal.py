"""A checkpoint for another number of ranks, made by DeepSpeed's own converter.

`step00000010.universal/` lies beside the checkpoint that it was made from, with a manifest of its
own, and is used again where both are whole.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from nsa.atomic_io import atomic_write_text, fsync_dir
from nsa.checkpoint.commit import PARTIAL
from nsa.checkpoint.errors import explain
from nsa.checkpoint.manifest import (
    MANIFEST,
    STATE,
    find_problem,
    manifest_text,
    rank_file,
    read_manifest,
    rng_file,
    seal,
)
from nsa.checkpoint.state_file import ANY, read_topology

CONVERTER = "deepspeed.checkpoint.ds_to_universal"


def needs_universal(checkpoint: Path, ranks: int) -> bool:
    """Whether `ranks` ranks can only load this after a conversion; ZeRO stage 0 never needs it."""
    under = read_topology(checkpoint)
    return under["layout"] != "0" and under["ranks"] not in (ranks, ANY)


def to_universal(checkpoint: Path) -> Path:
    """The universal form of a whole checkpoint; on one rank, while the others wait.

    Raises a ValueError with the converter's last words where it fails; then nothing is left.
    """
    under = read_topology(checkpoint)
    if under["layout"] == "3":
        raise ValueError(
            f"{checkpoint} was saved with ZeRO stage 3, which is not converted here; start "
            f"{under['ranks']} ranks"
        )
    target = checkpoint.with_name(f"{checkpoint.name}.universal")
    source = read_manifest(checkpoint)
    if find_problem(target) is None and read_manifest(target)["made_from"] == source["files"]:
        return target
    draft = checkpoint.with_name(f".{target.name}{PARTIAL}")
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir()
        converted = draft / "converted"  # the converter writes a file into the folder above
        _convert(checkpoint, converted)
        _add_ours(checkpoint, converted, source["ranks"])
        files = sorted(path for path in converted.rglob("*") if path.is_file())
        sealed = {str(path.relative_to(converted)): seal(path) for path in files}
        content = {**source, "made_from": source["files"], "files": sealed}
        atomic_write_text(converted / MANIFEST, manifest_text(content))
        for folder in [converted, *(path for path in converted.rglob("*") if path.is_dir())]:
            fsync_dir(folder)
        if target.exists():
            shutil.rmtree(target)
        converted.rename(target)
        fsync_dir(target.parent)
    except OSError as error:
        raise ValueError(explain(error, Path(error.filename or draft))) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _convert(checkpoint: Path, converted: Path) -> None:
    """In a process of its own: the converter keeps state in its module, and prints."""
    command = [sys.executable, "-m", CONVERTER, "--inject_missing_state"]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    command += ["--input_folder", str(checkpoint), "--output_folder", str(converted)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"{checkpoint} could not be converted: {words}")


def _add_ours(checkpoint: Path, converted: Path, ranks: int) -> None:
    """What DeepSpeed knows nothing of; the random numbers of the ranks come along as well."""
    written = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    written["saved_under"]["ranks"] = ANY
    (converted / STATE).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    for rank in range(ranks):
        for name in (rng_file(rank), rank_file(rank)):
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, converted / name)
