"""A toy run for the watchdog: a launcher and two ranks that write heartbeats and misbehave.

    python toy_run.py FOLDER FAULT ... [--resume] [--run-dir FOLDER]

A FAULT is `0:hang` for rank 0, or `launcher:die`; `run_rank` lists them. `train`:
stay in the backward pass. `linger`: do not exit after the last heartbeat. Only the standard library
is imported, so that it starts fast.
"""

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
ENDS = {"failed": ("failed", 1), "exit-2": ("failed", 2), "no-go": ("no-go: a NaN", 3)}


class ToyRank:
    """Writes the heartbeats of a rank."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number, self.clock = number, 0.0
        self.path = folder / f"heartbeat_rank{number}.jsonl"
        self.file = self.path.open("ab", buffering=0)
        self.phase, self.entered, self.step = "setup", time.monotonic(), 0
        self.write("start")

    def enter(self, phase: str, ago: float = 0.0) -> None:
        self.phase, self.entered = phase, time.monotonic() - ago

    def write(self, event: str, **more: object) -> None:
        now = time.monotonic()
        line = {
            "time": time.time() + self.clock,
            "mono": now,
            "event": event,
            "rank": self.number,
            "pid": os.getpid(),
            "host": platform.node(),
            "phase": self.phase,
            "since": now - self.entered,
            "step": self.step,
            "micro_step": 0,
            "tokens": 64 * self.step,
            "loss": 1.5,
            "skipped": 0,
            "memory_gb": 0.25,
        }
        self.file.write((json.dumps({**line, **more}) + "\n").encode())

    def wait(self, seconds: float = FOREVER) -> None:
        """Do nothing but write heartbeats."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(INTERVAL, seconds))
            self.write("progress")

    def steps(self, upto: int) -> None:
        while self.step < upto:
            self.enter("forward")
            self.write("step_start")
            self.wait(INTERVAL)
            self.step += 1
            self.write("step_end")

    def end(self, status: str, code: int) -> None:
        self.write("end", status=status)
        os._exit(code)


def run_rank(folder: Path, number: int, faults: list[str], resumed: bool) -> None:
    rank = ToyRank(folder, number)
    signal.signal(signal.SIGTERM, lambda *_: rank.end("preempted: SIGTERM", 0))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a real rank writes its stacks
    if "ignore-sigterm" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "stacks" in faults:
        stacks = folder / "stacks" / f"rank{number}.txt"
        stacks.parent.mkdir(exist_ok=True)
        signal.signal(signal.SIGUSR1, lambda *_: stacks.write_text("a stack\n") and None)
    if "worker" in faults:  # in a session of its own, ignores SIGTERM
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        (folder / f"worker{number}").write_text(str(child.pid))
    deadline = time.monotonic() + 20.0
    while not (folder / "watched").exists() and time.monotonic() < deadline:
        time.sleep(INTERVAL)
    rank.wait(2.0)  # long enough for a busy watchdog to find the ranks after a restart
    rank.steps(3)
    if "clock-jump" in faults:
        rank.clock = -86_400.0
    if "hang" in faults:
        peer = folder / "heartbeat_rank0.jsonl"
        while "0:train" in sys.argv and '"backward"' not in peer.read_text():
            rank.wait(INTERVAL)
        rank.enter("forward", ago=100)
        rank.wait()
    if "slow-save" in faults:
        rank.enter("save", ago=100)
        rank.wait(1.2)
    if "sigstop" in faults:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "train" in faults:
        rank.enter("backward")
        rank.wait()
    if "sigkill" in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    if "crash-once" in faults and not resumed:
        rank.end("failed", 1)
    if "linger" in faults:
        rank.write("end", status="stopped at --until 3 of 9 steps")
        time.sleep(FOREVER)
    for fault in ENDS.keys() & faults:
        rank.end(*ENDS[fault])
    rank.end("finished", 0)


def launch(folder: Path, faults: list[str], resumed: bool) -> None:
    """Like DeepSpeed's launcher: when a rank fails, end the others and exit with its code.

    On SIGTERM it kills its ranks at once; the real one waits 30 s.
    """
    ranks: list[int] = []
    for number in range(2):
        own = [fault.partition(":")[2] for fault in faults if fault.startswith(f"{number}:")]
        pid = os.fork()
        if pid == 0:
            run_rank(folder, number, own, resumed)
        ranks.append(pid)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in ranks])
    if "launcher:die" in faults:
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
