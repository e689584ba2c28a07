"""A run in small, for the watchdog: a launcher, and ranks that write heartbeats and misbehave.

    python toy_run.py FOLDER DEED ... [--resume] [--run-dir FOLDER]

There are two ranks. A DEED is `0:hang` for a deed of rank 0, `launcher:die` for one of the
launcher. Only the standard library is imported, so that it starts in no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

INTERVAL = 0.05
FOREVER = 600.0


class ToyRank:
    """Writes what a rank writes."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number, self.clock = number, 0.0
        self.path = folder / f"heartbeat_rank{number}.jsonl"
        self.file = self.path.open("ab", buffering=0)
        self.phase, self.began, self.step = "setup", time.monotonic(), 0
        self.tell("start")

    def enter(self, phase: str, ago: float = 0.0) -> None:
        self.phase, self.began = phase, time.monotonic() - ago

    def tell(self, event: str, **more: object) -> None:
        now = time.monotonic()
        line = {
            "time": time.time() + self.clock,
            "mono": now,
            "event": event,
            "rank": self.number,
            "pid": os.getpid(),
            "host": platform.node(),
            "phase": self.phase,
            "since": now - self.began,
            "step": self.step,
            "micro_step": 0,
            "tokens": 64 * self.step,
            "loss": 1.5,
            "skipped": 0,
            "memory_gb": 0.25,
        }
        self.file.write((json.dumps({**line, **more}) + "\n").encode())

    def wait(self, seconds: float = FOREVER) -> None:
        """Do nothing, while a heartbeat's thread goes on."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(INTERVAL, seconds))
            self.tell("progress")

    def steps(self, upto: int) -> None:
        while self.step < upto:
            self.enter("forward")
            self.tell("step_start")
            self.wait(INTERVAL)
            self.step += 1
            self.tell("step_end")

    def end(self, status: str, code: int) -> None:
        self.tell("end", status=status)
        os._exit(code)


def be_rank(folder: Path, number: int, deeds: list[str], resumed: bool) -> None:
    rank = ToyRank(folder, number)
    signal.signal(signal.SIGTERM, lambda *_: rank.end("preempted: SIGTERM", 0))
    if "deaf" in deeds:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "stacks" in deeds:
        stacks = folder / "stacks" / f"rank{number}.txt"
        stacks.parent.mkdir(exist_ok=True)
        signal.signal(signal.SIGUSR1, lambda *_: stacks.write_text("a stack\n") and None)
    if "worker" in deeds:  # one that leaves its family, and hears no SIGTERM
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        (folder / f"worker{number}").write_text(str(child.pid))
    rank.steps(4 if "further" in deeds and resumed else 3)
    if "clock" in deeds:
        rank.clock = -86_400.0
    if "hang" in deeds:
        rank.enter("forward", ago=100)
        rank.wait()
    if "slow-save" in deeds:
        rank.enter("save", ago=100)
        rank.wait(1.2)
    if "stop" in deeds:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "train" in deeds:
        rank.enter("backward")
        rank.wait()
    if "killed" in deeds:
        os.kill(os.getpid(), signal.SIGKILL)
    if "crash-once" in deeds and not resumed:
        rank.end("failed", 1)
    if "linger" in deeds:
        rank.tell("end", status="finished")
        time.sleep(FOREVER)
    for deed, status, code in (("failed", "failed", 1), ("mistake", "failed", 2)):
        if deed in deeds:
            rank.end(status, code)
    if "no-go" in deeds:
        rank.end("no-go: the loss is not finite", 3)
    rank.end("finished", 0)


def launch(folder: Path, deeds: list[str], resumed: bool) -> None:
    """As deepspeed's launcher does: end the others when one fails, and exit with its code.

    Told to end, it kills them; without the 30 s that the real one waits before.
    """
    ranks: list[int] = []
    for number in range(2):
        own = [deed.partition(":")[2] for deed in deeds if deed.startswith(f"{number}:")]
        pid = os.fork()
        if pid == 0:
            be_rank(folder, number, own, resumed)
        ranks.append(pid)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in ranks])
    if "launcher:die" in deeds:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        pid, status = os.wait()
        ranks.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            for other in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
                os.waitpid(other, 0)
            sys.exit(code)


if __name__ == "__main__":
    words = sys.argv[2:]
    (run_dir := Path(sys.argv[1])).mkdir(exist_ok=True)
    with (run_dir / "calls.txt").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    launch(run_dir, [word for word in words if ":" in word], "--resume" in words)
