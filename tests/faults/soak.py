"""Random faults against one run for a while; then its losses against a run without any."""

from __future__ import annotations

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
from pathlib import Path

from nsa.monitor.heartbeat import last_beat
from tests.engine.runs import BIN, TINY, losses
from tests.faults.processes import LAUNCHER, find
from tests.ranks import ROOT, free_port, user_environment

SETTINGS = [
    *TINY,
    "--steps=1000000",  # of the schedule; time ends the run
    "--set=train.eval_every=100",
    "--set=checkpoint.every=25",
    "--set=checkpoint.keep=4",
    "--set=monitor.tensorboard=false",
    "--set=monitor.health=false",
    "--set=monitor.heartbeat=0.5",
    *(f"--set=monitor.watch.{name}=15" for name in ("data", "compute", "evaluation", "save")),
    "--set=monitor.watch.silence=10",
    "--set=monitor.watch.grace=5",
    "--set=monitor.watch.on_collapse=ignore",
]
AGAIN = (0, 1, 4, 137)  # exit codes of a watchdog whose run may go on


class Soak:
    """One run, and what is done to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self._chance = random.Random(seed)
        self._watchdog: subprocess.Popen[bytes] | None = None
        self.lives = 0
        self.faults: Counter[str] = Counter()

    def suffer(self, seconds: float) -> None:
        """Faults for so long, then an end in good order."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self._progress()
                time.sleep(self._chance.uniform(0, 3))
                fault = self._chance.choice(FAULTS)
                try:
                    fault(self)
                except (LookupError, OSError) as error:  # the process or file has just gone
                    print(f"  {fault.__name__}: {error}")
                    continue
                self.faults[fault.__name__] += 1
                print(f"{end - time.monotonic():6.0f} s left, step {self.step}: {fault.__name__}")
            self._progress()
        finally:
            if self._watchdog is not None:
                self._watchdog.send_signal(signal.SIGTERM)
                print(f"the run ended with exit code {self._watchdog.wait(120)}")

    @property
    def step(self) -> int:
        """The steps that were done."""
        beat = last_beat(self.run_dir / "heartbeat_rank0.jsonl")
        return -1 if beat is None else int(beat["step"])

    def _progress(self) -> None:
        """Wait until the run, started again if need be, has gone on from where it is."""
        step, patience = self.step, time.monotonic() + 240
        while self.step <= step or not self._is_watched():
            if not self._is_watched():
                code = None if self._watchdog is None else self._watchdog.returncode
                if code not in (None, *AGAIN):
                    raise SystemExit(f"the watchdog ended with code {code}; see {self.folder}")
                self._start()
            if time.monotonic() > patience:
                raise SystemExit(f"no step in 4 minutes after step {step}; see {self.folder}")
            time.sleep(0.2)

    def _is_watched(self) -> bool:
        return self._watchdog is not None and self._watchdog.poll() is None

    def _start(self) -> None:
        resume = ["--resume"] if (self.run_dir / "config.yaml").exists() else []
        arguments = [*SETTINGS, f"--run-dir={self.run_dir}", *resume]
        watch = [str(BIN / "nsa"), "watch", "--restart=1000", "--backoff=0.5", "--"]
        with (self.folder / "said").open("ab") as said:
            self._watchdog = subprocess.Popen(
                [*watch, *launcher(), *arguments],
                env=environment(),
                stdout=said,
                stderr=said,
            )
        self.lives += 1

    def process(self, which: str) -> int:
        """The process of a rank or of the launcher."""
        assert self._watchdog is not None
        return find(self._watchdog.pid, which)

    def a_rank(self) -> int:
        """The process of a rank."""
        return self.process(self._chance.choice("01"))

    def newest(self) -> Path:
        """A file of the newest checkpoint."""
        folder = max((self.run_dir / "checkpoints").glob("step*"))
        return self._chance.choice(sorted(folder.iterdir()))


def kill_a_rank(soak: Soak) -> None:
    os.kill(soak.a_rank(), signal.SIGKILL)


def kill_all_ranks(soak: Soak) -> None:
    for process in [soak.process(rank) for rank in "01"]:
        os.kill(process, signal.SIGKILL)


def kill_the_launcher(soak: Soak) -> None:
    os.kill(soak.process(LAUNCHER), signal.SIGKILL)


def stop_a_rank(soak: Soak) -> None:
    os.kill(soak.a_rank(), signal.SIGSTOP)


def ask_a_rank_to_end(soak: Soak) -> None:
    os.kill(soak.a_rank(), signal.SIGTERM)


def cut_a_file_of_the_newest_checkpoint(soak: Soak) -> None:
    path = soak.newest()
    os.truncate(path, path.stat().st_size // 2)
    kill_a_rank(soak)


def delete_a_file_of_the_newest_checkpoint(soak: Soak) -> None:
    soak.newest().unlink()
    kill_a_rank(soak)


def write_rubbish_into_a_heartbeat(soak: Soak) -> None:
    with (soak.run_dir / "heartbeat_rank1.jsonl").open("ab") as file:
        file.write(b"\xff\x00{]\n" * 20)


FAULTS: list[Callable[[Soak], None]] = [
    kill_a_rank,
    kill_all_ranks,
    kill_the_launcher,
    stop_a_rank,
    ask_a_rank_to_end,
    cut_a_file_of_the_newest_checkpoint,
    delete_a_file_of_the_newest_checkpoint,
    write_rubbish_into_a_heartbeat,
]


def launcher() -> list[str]:
    """What starts a run on two ranks."""
    port = f"--master_port={free_port()}"
    return [str(BIN / "deepspeed"), "--num_gpus=2", port, str(ROOT / "recipes/m7c.py")]


def environment() -> dict[str, str]:
    """A shell's."""
    return user_environment() | {"OMP_NUM_THREADS": "1"}


def main() -> None:
    """Soak for so many minutes, with a seed."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, {minutes:g} minutes, in {folder}", flush=True)
    soak = Soak(folder, seed)
    soak.suffer(60 * minutes)
    found = losses(soak.run_dir)
    last = max(found)
    print(f"{last} steps and {sum(soak.faults.values())} faults: {json.dumps(soak.faults)}")
    print("now the same steps without a fault", flush=True)
    arguments = [*SETTINGS, "--run-dir=golden", f"--until={last}"]
    with (folder / "golden.txt").open("wb") as said:
        done = subprocess.run(
            [*launcher(), *arguments], cwd=folder, env=environment(), stdout=said, stderr=said
        )
    golden = losses(folder / "golden")
    missing = sorted(golden.keys() - found.keys())
    different = sorted(step for step in found if found[step] != golden.get(step))
    print(f"steps that differ: {different or 'none'}; not in metrics.csv: {missing or 'none'}")
    if different or missing or done.returncode not in (0, 3):
        raise SystemExit(f"FAILED, with seed {seed}; see {folder}")
    shutil.rmtree(folder)
    print("every loss is the same to the last bit")


if __name__ == "__main__":
    main()
