"""A tiny run on two real ranks that suffers a fault, and the same run going on afterwards."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa import checkpoint
from nsa.monitor.heartbeat import read_heartbeats
from tests.engine.runs import BIN, LIMIT, TINY, deepspeed, losses, succeed
from tests.ranks import ROOT, Ranks, start_ranks

STEPS, EVERY = 12, 4  # of a run, and between its checkpoints
FAULTY = Path(__file__).with_name("faulty.py")
SETTINGS = [
    *TINY,
    f"--steps={STEPS}",
    f"--set=checkpoint.every={EVERY}",
    "--set=train.eval_every=5",
    "--set=monitor.heartbeat=0.1",
    "--run-dir=run",
]


@dataclass
class Run:
    """Ranks at work, or what they have left behind."""

    folder: Path  # the run's is run/ within
    ranks: Ranks
    codes: list[int | None] = field(default_factory=list)

    @property
    def dir(self) -> Path:
        """The run's own folder."""
        return self.folder / "run"

    def beats(self, rank: int) -> list[dict[str, Any]]:
        """A rank's heartbeat so far."""
        return read_heartbeats(self.dir).get(rank, []) if self.dir.exists() else []

    def wait_for(self, what: Callable[[], object], why: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + LIMIT
        while not what():
            over = None not in self.ranks.codes() or time.monotonic() > deadline
            assert not over, f"{why}\n{self.ranks.text('err')[-2_000:]}"
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        """Wait until both ranks have begun a step."""
        for rank in range(len(self.ranks.pids)):
            self.wait_for(
                lambda rank=rank: any(
                    beat["event"] == "step_start" and beat["step"] + 1 >= step
                    for beat in self.beats(rank)
                ),
                f"rank {rank} did not come to step {step}",
            )

    def end(self) -> Run:
        """Let the ranks end: all of them, once one has failed, as the launcher does it."""
        try:
            self.ranks.wait_for_failure(time.monotonic() + LIMIT)
        finally:
            self.ranks.end()
        self.codes = self.ranks.codes()
        return self

    @property
    def last_step(self) -> int:
        """The steps that were done."""
        return max((beat["step"] for rank in (0, 1) for beat in self.beats(rank)), default=0)

    @property
    def said(self) -> str:
        """Everything that was printed."""
        return self.ranks.text("out") + self.ranks.text("err")


def start(folder: Path, *arguments: str, program: Path | None = None, **more: str) -> Run:
    """Start the run in `folder`, on two ranks."""
    program = program or ROOT / "recipes/m7c.py"
    return Run(folder, start_ranks(program, *SETTINGS, *arguments, folder=folder, environment=more))


def start_faulty(
    folder: Path,
    do: str,
    where: str,
    *arguments: str,
    step: int = 6,
    ranks: Sequence[int] = (1,),
    number: int = 1,
) -> Run:
    """Start the run with a fault planted; `faulty.py` knows which there are."""
    fault = {"do": do, "where": where, "step": step, "ranks": list(ranks), "number": number}
    fault["mark"] = str(folder / "suffered")
    return start(folder, *arguments, program=FAULTY, FAULT=json.dumps(fault))


def suffered(run: Run) -> float:
    """When the fault happened; an AssertionError where it did not."""
    marks = list(run.folder.glob("suffered.*"))
    assert marks, f"the fault did not happen\n{run.said[-2_000:]}"
    return min(float(mark.read_text()) for mark in marks)


def watch(run: Run) -> Ranks:
    """`nsa watch` on a run that goes."""
    run.wait_for(lambda: run.beats(0) and run.beats(1), "no heartbeat")
    return start_ranks(BIN / "nsa", "watch", str(run.dir), folder=run.folder, ranks=0)


@dataclass
class Resumed:
    """What became of a run that went on."""

    step: int  # where
    losses: dict[int, float]
    weights: str
    said: str


def resume(folder: Path, *arguments: str) -> Resumed:
    """Let the run go on to its end."""
    said = succeed(deepspeed("m7c.py", "--run-dir=run", "--resume", *arguments, folder=folder))
    match = re.search(r"steps (\d+) to", said)
    assert match, said
    return Resumed(int(match[1]) - 1, losses(folder / "run"), weights(folder / "run"), said)


def weights(run_dir: Path) -> str:
    """A hash of what the run has learnt, to the last bit."""
    path, notes = checkpoint.newest_complete(run_dir / "checkpoints")
    assert path is not None, notes
    assert path.name == f"step{STEPS:08d}"
    digest = hashlib.sha256()
    for file in sorted(path.glob("*states.pt")):
        _feed(digest, torch.load(file, map_location="cpu", weights_only=False))
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
