"""A tiny run on two real ranks, with or without a planted fault, and the same run resumed.

Also finds the processes of a run that DeepSpeed's launcher started.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves

from nsa.checkpoint.commit import newest_valid
from tests.engine.runs import LIMIT, TINY, losses, on_two_ranks, succeed
from tests.monitor.run_folders import read_heartbeats
from tests.ranks import SpawnedRanks, spawn_ranks

STEPS, EVERY = 12, 4  # of a run, and between its checkpoints
FAULTY = Path(__file__).with_name("faulty.py")
WATCHED = Path(__file__).with_name("watched.py")
LAUNCHER = "deepspeed.launcher.launch"
SETTINGS = [
    *TINY,
    f"--steps={STEPS}",
    f"--set=checkpoint.every={EVERY}",
    "--set=train.eval_every=5",
    "--run-dir=run",
]


@dataclass
class Run:
    """The ranks of a run, running or ended; its run folder is `folder`/run."""

    folder: Path
    ranks: SpawnedRanks
    codes: list[int | None] = field(default_factory=list)
    ended: float = 0.0  # when all ranks had

    @property
    def dir(self) -> Path:
        return self.folder / "run"

    def beats(self, rank: int) -> list[dict[str, Any]]:
        """Return a rank's heartbeats so far."""
        return read_heartbeats(self.dir).get(rank, []) if self.dir.exists() else []

    def wait_for(self, condition: Callable[[], object], failure: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            over = None not in self.ranks.codes() or time.monotonic() > deadline
            assert not over, f"{failure}\n{self.ranks.text('err')[-2_000:]}"
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        """Wait until both ranks have started a step."""
        for rank in range(len(self.ranks.pids)):
            self.wait_for(
                lambda rank=rank: any(
                    beat["event"] == "step_start" and beat["step"] + 1 >= step
                    for beat in self.beats(rank)
                ),
                f"rank {rank} did not reach step {step}",
            )

    def end(self) -> "Run":
        """Wait for the end; once one rank has failed, end the others as the launcher does."""
        try:
            self.ranks.wait_for_failure(time.monotonic() + LIMIT)
        finally:
            self.ranks.end()
        self.codes, self.ended = self.ranks.codes(), time.time()
        return self

    @property
    def last_step(self) -> int:
        """The number of steps done."""
        return max((beat["step"] for rank in (0, 1) for beat in self.beats(rank)), default=0)

    @property
    def output(self) -> str:
        return self.ranks.text("out") + self.ranks.text("err")


def start(
    folder: Path, *arguments: str, ranks: int = 2, watched: bool = False, **environment: str
) -> Run:
    """Start the run in `folder`; `watched`: by `nsa watch`, whose code it returns."""
    command = [str(FAULTY), *SETTINGS, *arguments]
    if watched:
        command, ranks = [str(WATCHED), "--", *command], 0
    program, *rest = command
    started = spawn_ranks(Path(program), *rest, folder=folder, ranks=ranks, environment=environment)
    return Run(folder, started)


def start_faulty(
    folder: Path,
    action: str,
    where: str,
    *arguments: str,
    step: int = 6,
    ranks: Sequence[int] = (1,),
    call: int = 1,
    watched: bool = False,
) -> Run:
    """Start the run with a fault planted at the `call`-th call of `where`; see faulty.py."""
    fault = {"action": action, "where": where, "step": step, "call": call}
    fault |= {"ranks": list(ranks), "mark": str(folder / "happened")}
    return start(folder, *arguments, watched=watched, FAULT=json.dumps(fault))


def fault_time(run: Run) -> float:
    """Return when the fault happened; fail if it did not."""
    marks = list(run.folder.glob("happened.*"))
    assert marks, f"the fault did not happen\n{run.output[-2_000:]}"
    return min(float(mark.read_text()) for mark in marks)


@dataclass
class Resumed:
    """A run that was resumed and has finished."""

    step: int  # that it was resumed from
    losses: dict[int, float]
    weights: str
    output: str


def resume(folder: Path) -> Resumed:
    """Resume the run and let it finish."""
    output = succeed(on_two_ranks("m7c.py", "--run-dir=run", "--resume", folder=folder))
    match = re.search(r"steps (\d+) to", output)
    assert match, output
    return Resumed(int(match[1]) - 1, losses(folder / "run"), weights(folder / "run"), output)


def weights(run_dir: Path) -> str:
    """Return a hash of all tensors in the last checkpoint."""
    path, notes = newest_valid(run_dir / "checkpoints")
    assert path is not None, notes
    assert path.name == f"step{STEPS:08d}"
    digest = hashlib.sha256()
    for file in sorted(path.glob("*states.pt")):
        for leaf in tree_leaves(torch.load(file, map_location="cpu", weights_only=False)):
            if isinstance(leaf, torch.Tensor):
                digest.update(leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def find(ancestor: int, name: str) -> int:
    """Return the pid of rank "0" or "1" or of the LAUNCHER; raise LookupError if there is none."""
    for process in descendants(ancestor):
        try:
            words, rank = process.cmdline(), process.environ().get("RANK")
        except psutil.Error:
            continue
        writer = any("nsa.data.writer" in word for word in words)
        if name == (LAUNCHER if LAUNCHER in words else rank) and not writer:
            return process.pid
    raise LookupError(f"no process of {name}")
