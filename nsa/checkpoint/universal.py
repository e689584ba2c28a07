"""Universal checkpoints: conversion for another number of ranks, by DeepSpeed's converter.

`step00000010.universal/`, next to the original, is reused while both are valid.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from nsa.checkpoint.commit import (
    PARTIAL,
    explain_write_errors,
    find_problem,
    publish_checkpoint,
    read_manifest,
    rng_file,
    sync_and_hash,
)
from nsa.checkpoint.state_file import ANY_RANKS, STATE, Checkpoint, layout_of
from nsa.system import isolated_environment
from nsa.untrusted import data_only


def needs_universal(saved: Checkpoint, ranks: int) -> bool:
    """Return whether loading on `ranks` ranks requires conversion; ZeRO stage 0 loads on any."""
    return saved.topology.layout != "0" and saved.topology.ranks not in (ranks, ANY_RANKS)


def to_universal(saved: Checkpoint) -> Checkpoint:
    """Return the universal form of a valid checkpoint; call on one rank while the others wait.

    If the converter fails, raise a ValueError with its last line and leave no files.
    """
    checkpoint, topology = saved.folder, saved.topology
    if topology.layout not in ("0", layout_of(1)):
        raise ValueError(
            f"{checkpoint} was saved with ZeRO stage {topology.layout}, which cannot be "
            f"converted; start {topology.ranks} ranks"
        )
    target = checkpoint.with_name(f"{checkpoint.name}.universal")
    universal = replace(saved, folder=target, topology=replace(topology, ranks=ANY_RANKS))
    source = read_manifest(checkpoint)
    if find_problem(target) is None and read_manifest(target).get("made_from") == source["files"]:
        return universal
    # If a crash leaves this folder, the next run removes it, as its name ends in PARTIAL.
    unfinished = TemporaryDirectory(PARTIAL, f".{target.name}.", checkpoint.parent)
    with explain_write_errors(target), unfinished as draft:
        converted = Path(draft) / "converted"  # the converter also writes into the folder above
        _convert(checkpoint, converted)
        # The converter ignores state.json and the ranks' random number generators.
        (converted / STATE).write_text(universal.to_json(), encoding="utf-8")
        for rank in range(source["ranks"]):
            if (checkpoint / rng_file(rank)).exists():
                shutil.copyfile(checkpoint / rng_file(rank), converted / rng_file(rank))
        files = sorted(path for path in converted.rglob("*") if path.is_file())
        entries = {str(path.relative_to(converted)): sync_and_hash(path) for path in files}
        manifest = {**source, "made_from": source["files"], "files": entries}
        publish_checkpoint(converted, target, manifest)
    return universal


def _convert(checkpoint: Path, converted: Path) -> None:
    """Run the converter as a process, because it keeps global state and prints."""
    # Without the working directory, "", in sys.path; Python 3.11 has the option -P for that.
    code = "import sys; sys.path = [*filter(None, sys.path)]; "
    command = [sys.executable, "-c", f"{code}import {__name__} as this; this.run_converter()"]
    command += ["--input_folder", str(checkpoint), "--output_folder", str(converted)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=isolated_environment(),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"{checkpoint} could not be converted: {last}")


def run_converter() -> None:
    """Run DeepSpeed's converter with this process's arguments; it reads files as data only."""
    checkpoint = Path(sys.argv[2])
    try:
        with data_only(checkpoint):
            runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
    except ValueError as error:
        sys.exit(str(error))
