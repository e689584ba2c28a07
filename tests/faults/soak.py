"""Soak test: random faults against one run for minutes, then its losses against a clean run."""

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

from nsa.monitor.artifacts import last_beat
from tests.engine.runs import BIN, TINY, losses
from tests.faults.processes import LAUNCHER, find
from tests.ranks import ROOT, free_port, user_environment

SETTINGS = [
    *TINY,
    "--steps=1000000",  # of the schedule; ended by time
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
RESUMABLE = (0, 1, 4, 137)  # exit codes of the watchdog


class Soak:
    """One run and the faults that it suffers."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self._rng = random.Random(seed)
        self._watchdog: subprocess.Popen[bytes] | None = None
        self.faults: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Inject faults for `seconds`, then end the run with SIGTERM."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self._progress()
                time.sleep(self._rng.uniform(0, 3))
                fault = self._rng.choice(FAULTS)
                try:
                    fault(self)
                except (LookupError, OSError) as error:  # the process or file disappeared
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
        """The number of steps done."""
        beat = last_beat(self.run_dir / "heartbeat_rank0.jsonl")
        return -1 if beat is None else int(beat["step"])

    def _progress(self) -> None:
        """Wait until the run, restarted if need be, has done another step."""
        step, deadline = self.step, time.monotonic() + 240
        while self.step <= step or not self._is_watched():
            if not self._is_watched():
                code = None if self._watchdog is None else self._watchdog.returncode
                if code not in (None, *RESUMABLE):
                    raise SystemExit(f"the watchdog ended with code {code}; see {self.folder}")
                self._start()
            if time.monotonic() > deadline:
                raise SystemExit(f"no step in 4 minutes after step {step}; see {self.folder}")
            time.sleep(0.2)

    def _is_watched(self) -> bool:
        return self._watchdog is not None and self._watchdog.poll() is None

    def _start(self) -> None:
        resume = ["--resume"] if (self.run_dir / "config.yaml").exists() else []
        arguments = [*SETTINGS, f"--run-dir={self.run_dir}", *resume]
        watch = [str(BIN / "nsa"), "watch", "--restart=1000", "--backoff=0.5", "--"]
        with (self.folder / "output").open("ab") as output:
            self._watchdog = subprocess.Popen(
                [*watch, *launcher(), *arguments],
                env=environment(),
                stdout=output,
                stderr=output,
            )

    def process(self, name: str) -> int:
        """Return the pid of a rank or of the launcher."""
        assert self._watchdog is not None
        return find(self._watchdog.pid, name)

    def random_rank(self) -> int:
        return self.process(self._rng.choice("01"))

    def newest_file(self) -> Path:
        """Return a random file of the newest checkpoint."""
        folder = max((self.run_dir / "checkpoints").glob("step*"))
        return self._rng.choice(sorted(folder.iterdir()))


def kill_one_rank(soak: Soak) -> None:
    os.kill(soak.random_rank(), signal.SIGKILL)


def kill_all_ranks(soak: Soak) -> None:
    for process in [soak.process(rank) for rank in "01"]:
        os.kill(process, signal.SIGKILL)


def kill_launcher(soak: Soak) -> None:
    os.kill(soak.process(LAUNCHER), signal.SIGKILL)


def stop_one_rank(soak: Soak) -> None:
    os.kill(soak.random_rank(), signal.SIGSTOP)


def terminate_one_rank(soak: Soak) -> None:
    os.kill(soak.random_rank(), signal.SIGTERM)


def truncate_a_checkpoint_file(soak: Soak) -> None:
    path = soak.newest_file()
    os.truncate(path, path.stat().st_size // 2)
    kill_one_rank(soak)


def delete_a_checkpoint_file(soak: Soak) -> None:
    soak.newest_file().unlink()
    kill_one_rank(soak)


def corrupt_a_heartbeat(soak: Soak) -> None:
    with (soak.run_dir / "heartbeat_rank1.jsonl").open("ab") as file:
        file.write(b"\xff\x00{]\n" * 20)


FAULTS: list[Callable[[Soak], None]] = [
    kill_one_rank,
    kill_all_ranks,
    kill_launcher,
    stop_one_rank,
    terminate_one_rank,
    truncate_a_checkpoint_file,
    delete_a_checkpoint_file,
    corrupt_a_heartbeat,
]


def launcher() -> list[str]:
    port = f"--master_port={free_port()}"
    return [str(BIN / "deepspeed"), "--num_gpus=2", port, str(ROOT / "recipes/m7c.py")]


def environment() -> dict[str, str]:
    return user_environment() | {"OMP_NUM_THREADS": "1"}


def main() -> None:
    """Arguments: minutes (default 20) and a seed."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, {minutes:g} minutes, in {folder}", flush=True)
    soak = Soak(folder, seed)
    soak.run(60 * minutes)
    by_step = losses(soak.run_dir)
    last = max(by_step)
    print(f"{last} steps and {sum(soak.faults.values())} faults: {json.dumps(soak.faults)}")
    print("now the same steps without faults", flush=True)
    arguments = [*SETTINGS, "--run-dir=golden", f"--until={last}"]
    with (folder / "golden.txt").open("wb") as output:
        done = subprocess.run(
            [*launcher(), *arguments], cwd=folder, env=environment(), stdout=output, stderr=output
        )
    golden = losses(folder / "golden")
    missing = sorted(golden.keys() - by_step.keys())
    different = sorted(step for step in by_step if by_step[step] != golden.get(step))
    print(f"steps that differ: {different or 'none'}; not in metrics.csv: {missing or 'none'}")
    if different or missing or done.returncode not in (0, 3):
        raise SystemExit(f"FAILED, with seed {seed}; see {folder}")
    shutil.rmtree(folder)
    print("all losses are bit-identical")


if __name__ == "__main__":
    main()
