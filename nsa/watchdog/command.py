"""`nsa watch`: start a run under the watchdog and restart it, or show its ranks' heartbeats."""

from __future__ import annotations

import argparse
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.monitor.artifacts import read_json
from nsa.text import align
from nsa.watchdog.hang_detector import last_beats
from nsa.watchdog.supervisor import (
    SignalState,
    Supervisor,
    adopt_orphans,
    log,
    open_heartbeats,
    update_halt,
)

NO_RESTART_CODES = (0, 2, 3)  # exit codes that a restart would only repeat
MAX_BACKOFF_SECONDS = 300.0
_POLL_SECONDS = 0.2
_HEADER = ["rank", "phase", "in phase for", "step", "last heartbeat", "loss", "memory", "process"]


def add_parser(verbs: Any) -> None:
    about = "start a run and watch it: end it if it hangs, restart it if --restart is given"
    watch = verbs.add_parser(
        "watch",
        help=about,
        description=about,
        usage="nsa watch [--restart N] [--backoff S] -- COMMAND | nsa watch --status RUN",
    )
    watch.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="a run's folder")
    about = "print each rank's phase, step and last heartbeat, then exit"
    watch.add_argument("--status", action="store_true", help=about)
    about = "restart COMMAND at most N times (default %(default)d)"
    watch.add_argument("--restart", type=int, metavar="N", default=0, help=about)
    watch.add_argument(
        "--backoff",
        type=float,
        metavar="S",
        default=10.0,
        help="wait S seconds before the first restart, then twice as long each time, up to 300 "
        "(default %(default)g)",
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
    if args.status:
        if args.folder is None or args.command:
            raise ValueError("--status: give the folder of a run, and no command")
        print(*_status_lines(args.folder), sep="\n")
        return 0
    if args.folder is not None:
        raise ValueError(
            f"nsa watch {args.folder}: attaching to a run that is running is withdrawn in this "
            "version; start it with nsa watch -- COMMAND, or add --status to see its ranks"
        )
    if not args.command:
        raise ValueError("nsa watch: give the command to start, after --")
    return _launch(args.command, restarts=args.restart, backoff=args.backoff)


def _launch(command: Sequence[str], *, restarts: int, backoff: float) -> int:
    """Run `command` under the watchdog and return the exit code of its ranks.

    No process that it starts outlives this call.
    """
    adopt_orphans()
    signals = SignalState()
    last_steps: list[int | None] = []  # of each attempt
    resume: list[str] = []  # arguments of a restart
    while True:
        launcher = subprocess.Popen(
            [*command, *resume], stdin=subprocess.DEVNULL, start_new_session=True
        )
        attempt = Supervisor(signals, launcher)
        code = attempt.run()
        folder = attempt.detector.folder if attempt.detector else None  # None: no heartbeat
        if code in NO_RESTART_CODES or signals.signal is not None or not restarts:
            return code
        step = max((int(beat["step"]) for beat in attempt.beats.values()), default=None)
        last_steps.append(step)
        if gave_up := _reason_to_give_up(last_steps, restarts):
            log(f"exit code {code}, not restarting: {gave_up}")
            if folder is not None:
                update_halt(folder, gave_up=gave_up)
            return code
        delay = min(backoff * 2 ** (len(last_steps) - 1), MAX_BACKOFF_SECONDS)
        if folder is not None:
            earlier = read_json(folder / "halt.json").get("restarts", [])  # may wait for the disk
            restart = {
                "time": time.time(),
                "reason": attempt.report.reason if attempt.report else f"exit code {code}",
                "exit_code": code,
                "step": step,
                "back_off": delay,
            }
            update_halt(folder, restarts=[*earlier, restart])
            resume = ["--run-dir", str(folder)]
            if (folder / "config.yaml").exists():  # otherwise a recipe refuses --resume
                resume = ["--resume", *resume]
        log(
            f"exit code {code} after step {step}; restart {len(last_steps)} of {restarts} in "
            f"{delay:g} s, with {' '.join(resume) or 'nothing to resume from'}"
        )
        deadline = time.monotonic() + delay
        while signals.signal is None and time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, delay))
        if signals.signal is not None:
            return 128 + signals.signal


def _reason_to_give_up(last_steps: Sequence[int | None], restarts: int) -> str | None:
    """Return why not to restart after attempts that ended at `last_steps`, or None."""
    step = last_steps[-1]
    if len(last_steps) > 1 and step == last_steps[-2]:
        where = "before the first heartbeat" if step is None else f"after step {step}"
        return f"crash loop, it ended {where} twice in a row"
    if len(last_steps) > restarts:
        return f"all {restarts} restarts are used up"
    return None


def _status_lines(folder: Path) -> list[str]:
    """Return a table of the ranks' last heartbeats; raise ValueError if there is no folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder of a run")
    rows = [_HEADER]
    for rank, beat in last_beats(folder).items():
        # Only the rank itself has this file open, not a later process with the same pid.
        file = folder.resolve() / f"heartbeat_rank{rank}.jsonl"
        is_running = file in open_heartbeats(int(beat["pid"]))
        age = time.monotonic() - beat["mono"] if is_running else time.time() - beat["time"]
        loss, memory, host = beat.get("loss"), beat.get("memory_gb"), beat.get("host")
        if beat["event"] == "end":
            process = f"ended: {beat.get('status')}"
        elif is_running:
            process = f"{beat['pid']:.0f} runs"
        elif host == platform.node():
            process = f"{beat['pid']:.0f} is gone"
        else:
            process = f"{beat['pid']:.0f} on {host}"
        rows.append(
            [
                str(rank),
                beat["phase"],
                f"{beat['since']:.0f} s",
                f"{beat['step']:,.0f}",
                f"{age:.0f} s ago",
                "-" if loss is None else f"{loss:.4f}",
                "-" if memory is None else f"{memory:.2f} GB",
                process,
            ]
        )
    return align(rows) if rows[1:] else [f"{folder}: no heartbeats"]
