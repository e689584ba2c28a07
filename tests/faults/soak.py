"""Soak test: random faults against one run for an hour, then its rows against a clean run's."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from nsa.monitor.artifacts import last_beat
from tests.disks import flip_a_bit, freezable_disk, frozen, truncate
from tests.engine.runs import BIN, TINY, read_metrics
from tests.faults.harness import LAUNCHER, find
from tests.ranks import ROOT, free_port, user_environment

SETTINGS = [
    *TINY,
    "--steps=1000000",  # length of the schedule; not reached
    "--set=train.eval_every=100",
    "--set=checkpoint.every=10",
    "--set=checkpoint.keep=4",
    "--set=monitor.tensorboard=false",
    *(f"--set=monitor.watch.{name}=15" for name in ("compute", "save", "silence")),
    "--set=monitor.watch.on_collapse=ignore",
]
RECIPE = ROOT / "recipes/m7c.py"
RESUMABLE = (0, 1, 4, 137)  # exit codes of the watchdog
COMPUTED = ("tokens", "loss", "val_loss", "bits_per_byte", "lr", "grad_norm")  # not speed
Rows = dict[int, list[float | None]]  # by step


class Soak:
    """A run under `nsa watch`, and the faults injected into it."""

    def __init__(self, folder: Path, seed: int, disk: Path | None) -> None:
        """`disk`: a file system of its own, which may be frozen and filled."""
        self.folder, self.disk = folder, disk
        self.run_dir = (disk or folder) / "run"
        self._rng = random.Random(seed)
        self.watchdog: Any = None  # the process, once started
        self.faults: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Inject faults for `seconds`, then end the run with SIGTERM."""
        end = time.monotonic() + seconds
        faults = FAULTS | (DISK_FAULTS if self.disk else {})
        try:
            while time.monotonic() < end:
                self._progress()
                time.sleep(self._rng.uniform(0, 6))
                name, fault = self._rng.choice([*faults.items()])
                try:
                    fault(self)
                except (LookupError, OSError, psutil.Error) as error:  # no such process or file
                    print(f"  {name}: {error}")
                    continue
                self.faults[name] += 1
                left = end - time.monotonic()
                print(f"{left:6.0f} s left, step {self.step}: {name}", flush=True)
            self._progress()
        finally:
            if self.watchdog is not None:
                self.watchdog.send_signal(signal.SIGTERM)
                print(f"the run ended with exit code {self.watchdog.wait(120)}")

    @property
    def step(self) -> int:
        """The number of steps done."""
        beat = last_beat(self.run_dir / "heartbeat_rank0.jsonl")
        return -1 if beat is None else int(beat["step"])

    def _progress(self) -> None:
        """Wait until the run, restarted if need be, has done another step."""
        step, deadline = self.step, time.monotonic() + 240
        while self.step <= step or not self._is_watched():
            if not self._is_watched():
                code = None if self.watchdog is None else self.watchdog.returncode
                if code not in (None, *RESUMABLE):
                    raise SystemExit(f"the watchdog ended with code {code}; see {self.folder}")
                self._start()
            if time.monotonic() > deadline:
                raise SystemExit(f"no step in 4 minutes after step {step}; see {self.folder}")
            time.sleep(0.2)

    def _is_watched(self) -> bool:
        return self.watchdog is not None and self.watchdog.poll() is None

    def _start(self) -> None:
        resume = ["--resume"] if (self.run_dir / "config.yaml").exists() else []
        arguments = [*SETTINGS, f"--run-dir={self.run_dir}", *resume]
        watch = [str(BIN / "nsa"), "watch", "--restart=1000", "--"]
        with (self.folder / "output").open("ab") as output:
            self.watchdog = subprocess.Popen(
                [*watch, *launcher(RECIPE), *arguments],
                env=environment(),
                stdout=output,
                stderr=output,
            )

    def process(self, name: str) -> int:
        """Return the pid of a rank or of the launcher."""
        return find(self.watchdog.pid, name)

    def signal_a_rank(self, number: signal.Signals) -> int:
        """Signal a random rank; return its pid."""
        rank = self.process(self._rng.choice("01"))
        os.kill(rank, number)
        return rank

    def random_checkpoint_file(self) -> Path:
        """Return a random file of the newest checkpoint; LookupError if there is none."""
        folders = sorted((self.run_dir / "checkpoints").glob("step*"))
        if not folders:
            raise LookupError("no checkpoint yet")
        return self._rng.choice(sorted(folders[-1].iterdir()))


def kill_after(damage: Callable[[Path], object], soak: Soak) -> None:
    """Damage a random file of the newest checkpoint, then kill a rank, so that it is read."""
    damage(soak.random_checkpoint_file())
    soak.signal_a_rank(signal.SIGKILL)


def kill_all_ranks(soak: Soak) -> None:
    for process in [soak.process(rank) for rank in "01"]:
        os.kill(process, signal.SIGKILL)


def pause_a_rank(soak: Soak) -> None:
    rank = soak.signal_a_rank(signal.SIGSTOP)
    time.sleep(3)
    os.kill(rank, signal.SIGCONT)


def terminate_the_watchdog(soak: Soak) -> None:
    soak.watchdog.send_signal(signal.SIGTERM)
    soak.watchdog.wait(120)


def corrupt_a_heartbeat(soak: Soak) -> None:
    with (soak.run_dir / "heartbeat_rank1.jsonl").open("ab") as file:
        file.write(b"\xff\x00{]\n" * 20)


def freeze_the_disk(soak: Soak) -> None:
    assert soak.disk is not None
    with frozen(soak.disk):
        time.sleep(17)  # longer than any rank may be silent


def fill_the_disk(soak: Soak) -> None:
    assert soak.disk is not None
    filler = soak.disk / "filler"
    try:
        with filler.open("wb") as file:
            for size in (2**26, 2**20, 2**12):  # the last bytes too
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
        time.sleep(5)
    finally:
        filler.unlink()


FAULTS: dict[str, Callable[[Soak], object]] = {
    "kill a rank": lambda soak: soak.signal_a_rank(signal.SIGKILL),
    "kill all ranks": kill_all_ranks,
    "kill the launcher": lambda soak: os.kill(soak.process(LAUNCHER), signal.SIGKILL),
    "stop a rank": lambda soak: soak.signal_a_rank(signal.SIGSTOP),
    "pause a rank": pause_a_rank,
    "terminate a rank": lambda soak: soak.signal_a_rank(signal.SIGTERM),
    "terminate the watchdog": terminate_the_watchdog,
    "flip a bit of a checkpoint": partial(kill_after, flip_a_bit),
    "truncate a file of a checkpoint": partial(kill_after, truncate),
    "delete a file of a checkpoint": partial(kill_after, Path.unlink),
    "corrupt a heartbeat": corrupt_a_heartbeat,
}
DISK_FAULTS = {"freeze the disk": freeze_the_disk, "fill the disk": fill_the_disk}


def launcher(program: Path) -> list[str]:
    return [str(BIN / "deepspeed"), "--num_gpus=2", f"--master_port={free_port()}", str(program)]


def environment() -> dict[str, str]:
    return user_environment() | {"OMP_NUM_THREADS": "1"}


def read_rows(run_dir: Path) -> Rows:
    """Return what each logged step computed."""
    rows = read_metrics(run_dir)
    return {int(row["step"] or 0): [row[name] for name in COMPUTED] for row in rows}


def compare(rows: Rows, golden: Rows) -> tuple[list[int], list[int]]:
    """Return the steps whose rows differ from the undisturbed run's, and those without a row."""
    different = [step for step in rows if rows[step] != golden.get(step)]
    return sorted(different), sorted(set(range(1, max(rows) + 1)) - rows.keys())


def main() -> None:
    """Arguments: minutes (default 60) and a seed."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, {minutes:g} minutes, in {folder}", flush=True)
    with contextlib.ExitStack() as stack:
        disk = None
        try:
            disk = stack.enter_context(freezable_disk(folder / "disk", megabytes=4_096))
        except pytest.skip.Exception as reason:
            print(f"no disk faults: {reason}")
        run_and_compare(Soak(folder, seed, disk), minutes)
    shutil.rmtree(folder)


def run_and_compare(soak: Soak, minutes: float) -> None:
    """Raise SystemExit if a row differs, or is missing although the disk was never full."""
    soak.run(60 * minutes)
    rows = read_rows(soak.run_dir)
    print(f"{max(rows)} steps and {soak.faults.total()} faults: {json.dumps(soak.faults)}")
    print("now the same steps without faults", flush=True)
    # One step more, because the last step of a run is evaluated.
    arguments = [*SETTINGS, "--run-dir=golden", f"--until={max(rows) + 1}"]
    with (soak.folder / "golden.txt").open("wb") as output:
        subprocess.run(
            [*launcher(RECIPE), *arguments],
            cwd=soak.folder,
            env=environment(),
            stdout=output,
            stderr=output,
        )
    different, missing = compare(rows, read_rows(soak.folder / "golden"))
    print(f"rows that differ: {len(different)} {different[:9]}")
    print(f"rows that were not written: {len(missing)} {missing[:9]}")
    if different or (missing and not soak.faults["fill the disk"]):
        raise SystemExit(f"FAILED; see {soak.folder}")


if __name__ == "__main__":
    main()
