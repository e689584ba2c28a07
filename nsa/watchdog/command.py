"""`nsa watch`: start a run under the watchdog, and restart it."""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.watchdog.supervisor import SignalState, Supervisor, adopt_orphans, log

NO_RESTART_CODES = (0, 2, 3)  # exit codes that a restart would only repeat
RESTART_SECONDS = 10.0  # between an attempt's end and the next


def add_parser(verbs: Any) -> None:
    about = "start a run and watch it: end it if it hangs, restart it if --restart is given"
    watch = verbs.add_parser(
        "watch", help=about, description=about, usage="nsa watch [--restart N] -- COMMAND"
    )
    watch.add_argument("folder", type=Path, nargs="?", help=argparse.SUPPRESS)
    about = "restart COMMAND at most N times (default %(default)d)"
    watch.add_argument("--restart", type=int, metavar="N", default=0, help=about)
    watch.set_defaults(run=_watch, command=[])


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a `watch` command line at `--`: the arguments of `nsa`, and the command to start."""
    if argv[:1] != ["watch"] or "--" not in argv:
        return list(argv), []
    index = list(argv).index("--")
    return list(argv[:index]), list(argv[index + 1 :])


def _watch(args: argparse.Namespace) -> int:
    if args.restart < 0:
        raise ValueError(f"--restart {args.restart}: must be 0 or more")
    if args.folder is not None:
        raise ValueError(
            f"nsa watch {args.folder}: attaching to a run that is running is withdrawn in this "
            "version; start it with nsa watch -- COMMAND"
        )
    if not args.command:
        raise ValueError("nsa watch: give the command to start, after --")
    return _launch(args.command, args.restart)


def _launch(command: Sequence[str], restarts: int) -> int:
    """Run `command` under the watchdog and return the exit code of its ranks.

    No process that it starts outlives this call.
    """
    adopt_orphans()
    signals = SignalState()
    last_steps: list[int | None] = []  # of each attempt; None: no heartbeat
    resume: list[str] = []  # arguments that a restart adds to `command`
    while True:
        launcher = subprocess.Popen(
            [*command, *resume], stdin=subprocess.DEVNULL, start_new_session=True
        )
        attempt = Supervisor(signals, launcher)
        code = attempt.run()
        if code in NO_RESTART_CODES or signals.signal is not None or not restarts:
            return code
        step = max((int(beat["step"]) for beat in attempt.beats.values()), default=None)
        last_steps.append(step)
        if reason := _reason_to_give_up(last_steps, restarts):
            log(f"exit code {code}, not restarting: {reason}")
            return code
        if attempt.detector is not None:  # there were heartbeats
            folder = attempt.detector.folder
            resume = ["--run-dir", str(folder)]
            if (folder / "config.yaml").exists():  # otherwise a recipe refuses --resume
                resume = ["--resume", *resume]
        log(
            f"exit code {code} after step {step}; restart {len(last_steps)} of {restarts} in "
            f"{RESTART_SECONDS:g} s, with {' '.join(resume) or 'nothing to resume from'}"
        )
        time.sleep(RESTART_SECONDS)
        if signals.signal is not None:
            return 128 + signals.signal


def _reason_to_give_up(last_steps: Sequence[int | None], restarts: int) -> str | None:
    """Return the reason against another restart, or None; attempts ended at `last_steps`."""
    step = last_steps[-1]
    if len(last_steps) > 1 and step == last_steps[-2]:
        where = "before the first heartbeat" if step is None else f"after step {step}"
        return f"crash loop, it ended {where} twice in a row"
    if len(last_steps) > restarts:
        return f"all {restarts} restarts are used up"
    return None
