"""`nsa watch`: start a run under the watchdog and restart it, or watch one that is going."""

from __future__ import annotations

import argparse
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.monitor.artifacts import read_json
from nsa.monitor.config import WatchConfig
from nsa.watchdog.halt import log, update_halt

if TYPE_CHECKING:
    from nsa.watchdog.supervisor import SignalState

FINAL = (0, 2, 3)  # exit codes after which the same command would end the same way again
MAX_BACKOFF_SECONDS = 300.0
_POLL_SECONDS = 0.2


def add_parser(verbs: Any) -> None:
    about = "watch a run from outside: end it where it hangs, and restart it on request"
    watch = verbs.add_parser(
        "watch",
        help=about,
        description=about,
        usage="nsa watch [--status] RUN | nsa watch [--restart N] [--backoff S] -- COMMAND",
    )
    watch.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="a run's folder")
    watch.add_argument("--status", action="store_true", help="print where its ranks are, and exit")
    watch.add_argument(
        "--restart", type=int, default=0, help="restart COMMAND at most this often (default 0)"
    )
    watch.add_argument(
        "--backoff",
        type=float,
        default=10.0,
        help="seconds before the first restart; doubles up to 300 (default 10)",
    )
    watch.set_defaults(run=_watch, command=[])


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a `watch` command line at `--`, into its own arguments and the command."""
    if argv[:1] != ["watch"] or "--" not in argv:
        return list(argv), []
    index = list(argv).index("--")
    return list(argv[:index]), list(argv[index + 1 :])


def _watch(args: argparse.Namespace) -> int:
    for name in ("restart", "backoff"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} {getattr(args, name)}: must be 0 or more")
    if bool(args.command) == bool(args.folder):
        raise ValueError("give the folder of a run, or -- and the command that starts one")
    if args.command and args.status:
        raise ValueError("--status: needs the folder of a run, and no command")
    if args.command:
        return launch(args.command, restarts=args.restart, backoff=args.backoff)
    if args.restart:
        raise ValueError("--restart: needs the command to start, after --")
    if not args.folder.is_dir():
        raise ValueError(f"{args.folder}: there is no such folder of a run")
    if args.status:
        print(*status_lines(args.folder), sep="\n")
        return 0
    return attach(args.folder.resolve())


def launch(command: Sequence[str], *, restarts: int = 0, backoff: float = 10.0) -> int:
    """Run `command` under the watchdog and return the exit code of its ranks.

    No process that it starts outlives this call.
    """
    import psutil

    from nsa.watchdog.process_tree import ProcessTree, adopt_orphans
    from nsa.watchdog.supervisor import SignalState, Supervisor

    adopt_orphans()
    signals, folder = SignalState(), _run_dir_of(command)
    last_steps: list[int | None] = []  # of each attempt
    resume: list[str] = []
    while True:
        launcher = subprocess.Popen(
            [*command, *resume], stdin=subprocess.DEVNULL, start_new_session=True
        )
        tree = ProcessTree(psutil.Process(), launcher.pid)
        attempt = Supervisor(tree, signals, launcher=launcher)
        code = attempt.run()
        folder = attempt.folder or folder
        if code in FINAL or signals.signal is not None or not restarts:
            return code
        last_steps.append(attempt.last_step)
        exists = folder is not None and folder.is_dir()
        if reason := _why_no_restart(last_steps, restarts):
            log(f"exit code {code}, not restarting: {reason}")
            if folder is not None and exists:
                update_halt(folder, {"gave_up": reason})
            return code
        resume = _resume_arguments(folder)
        delay = min(backoff * 2 ** (len(last_steps) - 1), MAX_BACKOFF_SECONDS)
        log(
            f"exit code {code} after step {last_steps[-1]}; restart {len(last_steps)} of "
            f"{restarts} in {delay:g} s, with {' '.join(resume) or 'nothing to resume from'}"
        )
        if folder is not None and exists:
            entry = {
                "time": time.time(),
                "reason": attempt.report.reason if attempt.report else f"exit code {code}",
                "exit_code": code,
                "step": attempt.last_step,
                "back_off": delay,
            }
            earlier = read_json(folder / "halt.json").get("restarts", [])
            update_halt(folder, {"restarts": [*earlier, entry]})
        if not _sleep(delay, signals):
            return 128 + (signals.signal or 0)


def attach(folder: Path) -> int:
    """Watch a run that is already going until it ends; it does not depend on this process."""
    from nsa.watchdog.process_tree import ProcessTree
    from nsa.watchdog.supervisor import SignalState, Supervisor, lock, newest_heartbeats

    if not lock(folder):
        raise ValueError(f"{folder} is watched already; nsa watch --status {folder} shows the run")
    supervisor = Supervisor(ProcessTree(), SignalState(), folder=folder)
    deadline = time.monotonic() + WatchConfig().setup
    while True:
        supervisor.look()
        beats = newest_heartbeats(folder)
        if supervisor.ranks:
            log(f"{folder}: watching ranks {', '.join(map(str, supervisor.ranks))}")
            return supervisor.run()
        if beats:
            return _report_ended(folder, beats)
        if time.monotonic() > deadline:
            raise ValueError(
                f"{folder} has no heartbeats: it has not started, or monitor.heartbeat = 0"
            )
        time.sleep(_POLL_SECONDS)


def status_lines(folder: Path) -> list[str]:
    from nsa.watchdog.process_tree import find_holder
    from nsa.watchdog.supervisor import newest_heartbeats

    rows = [["rank", "phase", "since", "step", "line", "loss", "memory", "process"]]
    for number, beat in newest_heartbeats(folder).items():
        pid, host = int(beat["pid"]), beat.get("host")
        loss, memory = beat.get("loss"), beat.get("memory_gb")
        process = find_holder(pid, folder / f"heartbeat_rank{number}.jsonl")
        age = time.monotonic() - beat["mono"] if process else time.time() - beat["time"]
        state = "lives" if process else "is gone" if host == platform.node() else f"on {host}"
        row = [str(number), beat["phase"], f"{beat['since']:.0f} s", f"{beat['step']:,.0f}"]
        row += [f"{age:.0f} s ago", "-" if loss is None else f"{loss:.4f}"]
        row += ["-" if memory is None else f"{memory:.2f} GB"]
        ended = beat["event"] == "end"
        rows.append([*row, f"ended: {beat.get('status')}" if ended else f"{pid} {state}"])
    if len(rows) == 1:
        return [f"{folder}: no heartbeats"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _report_ended(folder: Path, beats: dict[int, dict[str, Any]]) -> int:
    """Log how a run without running processes has ended; return the exit code for that."""
    unfinished = [number for number, beat in beats.items() if beat["event"] != "end"]
    if not unfinished:
        statuses = sorted({str(beat.get("status")) for beat in beats.values()})
        log(f"{folder} has ended: {', '.join(statuses)}")
        return 0
    hosts = {str(beat.get("host")) for beat in beats.values()} - {platform.node()}
    if hosts:
        raise ValueError(f"{folder}: its ranks run on {', '.join(sorted(hosts))}; watch it there")
    step = max(int(beat["step"]) for beat in beats.values())
    log(f"{folder} has ended: rank {unfinished[0]} died without a word, at or before step {step}")
    return 1


def _why_no_restart(last_steps: Sequence[int | None], restarts: int) -> str:
    if len(last_steps) > 1 and last_steps[-1] == last_steps[-2]:
        step = last_steps[-1]
        where = "before the first heartbeat" if step is None else f"after step {step}"
        return f"crash loop, it ended {where} twice in a row"
    return f"all {restarts} restarts are used up" if len(last_steps) > restarts else ""


def _run_dir_of(command: Sequence[str]) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, nargs="?")
    return parser.parse_known_args(command)[0].run_dir


def _resume_arguments(folder: Path | None) -> list[str]:
    """Return the flags that continue a run in `folder`; recipes refuse --resume without one."""
    if folder is None:
        return []
    started = (folder / "config.yaml").exists() or (folder / "checkpoints").exists()
    return [*(["--resume"] if started else []), "--run-dir", str(folder.resolve())]


def _sleep(seconds: float, signals: SignalState) -> bool:
    deadline = time.monotonic() + seconds
    while signals.signal is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(_POLL_SECONDS, left))
    return signals.signal is None
