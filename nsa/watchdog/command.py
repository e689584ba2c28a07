"""`nsa watch`: start a run under the watchdog and restart it, or watch one that is running."""

from __future__ import annotations

import argparse
import contextlib
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.monitor.config import WatchConfig
from nsa.text import align
from nsa.watchdog.disk import DiskHangs, DiskWorker
from nsa.watchdog.hang_detector import FolderState, last_beats
from nsa.watchdog.process_tree import adopt_orphans, find_writer
from nsa.watchdog.supervisor import SignalState, Supervisor, disk_of, log, update_halt

NO_RESTART_CODES = (0, 2, 3)  # exit codes that a restart would only repeat
MAX_BACKOFF_SECONDS = 300.0
_POLL_SECONDS = 0.2
_HEADER = ["rank", "phase", "in phase for", "step", "last heartbeat", "loss", "memory", "process"]


def add_parser(verbs: Any) -> None:
    about = "watch a run from outside: end it if it hangs, restart it if --restart is given"
    watch = verbs.add_parser(
        "watch",
        help=about,
        description=about,
        usage="nsa watch [--status] RUN | nsa watch [--restart N] [--backoff S] -- COMMAND",
    )
    watch.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="a run's folder")
    about = "print each rank's phase, step and last heartbeat, then exit"
    watch.add_argument("--status", action="store_true", help=about)
    about = "restart COMMAND at most N times (default 0)"
    watch.add_argument("--restart", type=int, metavar="N", default=0, help=about)
    watch.add_argument(
        "--backoff",
        type=float,
        metavar="S",
        default=10.0,
        help="wait S seconds before the first restart, then twice as long each time, up to 300 "
        "(default 10)",
    )
    watch.set_defaults(run=_watch, command=[])


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a `watch` command line at `--`: the arguments of `nsa`, and the command to start."""
    if argv[:1] != ["watch"] or "--" not in argv:
        return list(argv), []
    index = list(argv).index("--")
    return list(argv[:index]), list(argv[index + 1 :])


def _watch(args: argparse.Namespace) -> int:
    for name in ("restart", "backoff"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} {getattr(args, name)}: must be 0 or more")
    if bool(args.command) == bool(args.folder):
        raise ValueError("nsa watch: give the folder of a run, or -- and the command to start")
    if args.command and args.status:
        raise ValueError("--status: give the folder of a run instead of a command")
    if args.command:
        return launch(args.command, restarts=args.restart, backoff=args.backoff)
    if args.restart:
        raise ValueError("--restart: needs the command to start; give it after --")
    # Functions of this module, called in a child process with a time limit: the disk may hang.
    disk = DiskWorker(args.folder, sys.modules[__name__])
    if args.status:
        print(*disk.call("status_lines", args.folder), sep="\n")
        return 0
    return attach(disk.call("existing_folder", args.folder))


def launch(command: Sequence[str], *, restarts: int, backoff: float) -> int:
    """Run `command` under the watchdog and return the exit code of its ranks.

    No process that it starts outlives this call.
    """
    adopt_orphans()
    signals = SignalState()
    last_steps: list[int | None] = []  # of each attempt
    resume: list[str] = []
    folder: Path | None = None
    while True:
        launcher = subprocess.Popen(
            [*command, *resume], stdin=subprocess.DEVNULL, start_new_session=True
        )
        attempt = Supervisor(signals, launcher=launcher)
        code = attempt.run()
        folder = attempt.folder or folder
        if code in NO_RESTART_CODES or signals.signal is not None or not restarts:
            return code
        last_steps.append(step := attempt.last_step)
        if reason := _why_no_restart(last_steps, restarts):
            log(f"exit code {code}, not restarting: {reason}")
            update_halt(folder, gave_up=reason)
            return code
        delay = min(backoff * 2 ** (len(last_steps) - 1), MAX_BACKOFF_SECONDS)
        if folder is not None:
            reason = attempt.report.reason if attempt.report else f"exit code {code}"
            entry = {"time": time.time(), "reason": reason, "exit_code": code, "step": step}
            started = _record_restart(folder, {**entry, "back_off": delay}, signals)
            resume = [*(["--resume"] if started else []), "--run-dir", str(folder)]
        log(
            f"exit code {code} after step {step}; restart {len(last_steps)} of {restarts} in "
            f"{delay:g} s, with {' '.join(resume) or 'nothing to resume from'}"
        )
        deadline = time.monotonic() + delay
        while signals.signal is None and time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, delay))
        if signals.signal is not None:
            return 128 + signals.signal


def _record_restart(folder: Path, entry: dict[str, Any], signals: SignalState) -> bool:
    """Add the restart to halt.json; return whether the run can be resumed. Waits for the disk."""
    while signals.signal is None:
        with contextlib.suppress(DiskHangs):
            return bool(disk_of(folder).call("add_restart", entry))
        time.sleep(_POLL_SECONDS)
    return False


def _why_no_restart(last_steps: Sequence[int | None], restarts: int) -> str:
    if len(last_steps) > 1 and last_steps[-1] == last_steps[-2]:
        step = last_steps[-1]
        where = "before the first heartbeat" if step is None else f"after step {step}"
        return f"crash loop, it ended {where} twice in a row"
    return f"all {restarts} restarts are used up" if len(last_steps) > restarts else ""


def attach(folder: Path) -> int:
    """Watch a run that is already running until it ends; the run outlives this process."""
    deadline = time.monotonic() + WatchConfig().setup
    while True:
        state: FolderState = disk_of(folder).call("check", {})
        if state.lock_problem:
            raise ValueError(
                f"{folder}: {state.lock_problem}; nsa watch --status {folder} shows its ranks"
            )
        if beats := state.beats:
            break
        if time.monotonic() > deadline:
            raise ValueError(f"{folder}: no heartbeats; start the run with monitor.heartbeat > 0")
        time.sleep(_POLL_SECONDS)
    supervisor = Supervisor(SignalState(), folder=folder)
    supervisor.check()
    if supervisor.beats:
        log(f"{folder}: watching ranks {', '.join(map(str, supervisor.beats))}")
        return supervisor.run()
    unfinished = [rank for rank, beat in beats.items() if beat["event"] != "end"]
    hosts = {str(beat.get("host")) for beat in beats.values()} - {platform.node()}
    if unfinished and hosts:
        raise ValueError(f"{folder}: its ranks run on {', '.join(sorted(hosts))}; watch them there")
    how = ", ".join(sorted({str(beat.get("status")) for beat in beats.values()}))
    if unfinished:
        step = max(int(beat["step"]) for beat in beats.values())
        how = f"rank {unfinished[0]} exited without a last heartbeat, at or before step {step}"
    log(f"{folder} has ended: {how}")
    return 1 if unfinished else 0


def existing_folder(folder: Path) -> Path:
    """Return the absolute path of a folder; raise ValueError if there is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder of a run")
    return folder.resolve()


def status_lines(folder: Path) -> list[str]:
    """Return a table of the ranks' last heartbeats."""
    rows = [_HEADER]
    for rank, beat in last_beats(existing_folder(folder)).items():
        path = folder.resolve() / f"heartbeat_rank{rank}.jsonl"
        process = find_writer(int(beat["pid"]), path)
        age = time.monotonic() - beat["mono"] if process else time.time() - beat["time"]
        loss, memory, host = beat.get("loss"), beat.get("memory_gb"), beat.get("host")
        state = "runs" if process else "is gone" if host == platform.node() else f"on {host}"
        if beat["event"] == "end":
            state = f"ended: {beat.get('status')}"
        else:
            state = f"{beat['pid']:.0f} {state}"
        loss = "-" if loss is None else f"{loss:.4f}"
        memory = "-" if memory is None else f"{memory:.2f} GB"
        row = [str(rank), beat["phase"], f"{beat['since']:.0f} s", f"{beat['step']:,.0f}"]
        rows.append([*row, f"{age:.0f} s ago", loss, memory, state])
    return align(rows) if rows[1:] else [f"{folder}: no heartbeats"]
