"""`nsa watch`: starts a run or finds one, and sees to it that it trains or ends, and says why."""

from __future__ import annotations

import argparse
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.monitor.config import WatchConfig
from nsa.watchdog.halt import read_halt, record, say

if TYPE_CHECKING:
    from nsa.watchdog.supervisor import SignalState, Supervisor

FINAL = (0, 2, 3)  # exit codes after which the same command would only end the same way
MAX_BACKOFF = 300.0
_POLL = 0.2


def add_parser(verbs: Any) -> None:
    """Add `watch` to the verbs of `nsa`."""
    about = "watch a run from outside: end it where it hangs, and start it again on request"
    watch = verbs.add_parser(
        "watch",
        help=about,
        description=about,
        usage="nsa watch [--status] RUN | nsa watch [--restart N] [--backoff S] -- COMMAND",
    )
    watch.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="folder of a run")
    watch.add_argument("--status", action="store_true", help="only say where its ranks are")
    watch.add_argument(
        "--restart", type=int, default=0, help="how often COMMAND may be started again (default 0)"
    )
    watch.add_argument(
        "--backoff",
        type=float,
        default=10.0,
        help="seconds before the first restart; doubles up to 300 (default 10)",
    )
    watch.set_defaults(run=_watch, command=[])


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before `--` and what after it, which belongs to the command alone."""
    if argv[:1] != ["watch"] or "--" not in argv:
        return list(argv), []
    where = list(argv).index("--")
    return list(argv[:where]), list(argv[where + 1 :])


def _watch(args: argparse.Namespace) -> int:
    for name in ("restart", "backoff"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} {getattr(args, name)}: must be 0 or more")
    if bool(args.command) == bool(args.folder):
        raise ValueError("give the folder of a run, or -- and the command that starts one")
    if args.command:
        if args.status:
            raise ValueError("--status: needs the folder of a run, and no command")
        return launch(args.command, restarts=args.restart, backoff=args.backoff)
    if args.restart:
        raise ValueError("--restart: needs the command to start, after --")
    if not args.folder.is_dir():
        raise ValueError(f"{args.folder}: there is no such folder of a run")
    if args.status:
        print(*status_lines(args.folder), sep="\n")
        return 0
    return attach(args.folder)


def launch(command: Sequence[str], *, restarts: int = 0, backoff: float = 10.0) -> int:
    """Start `command`, watch the run that it makes, and return the exit code of its ranks.

    Nothing that it starts outlives this call.
    """
    import psutil

    from nsa.watchdog.process_tree import ProcessTree, adopt_orphans
    from nsa.watchdog.supervisor import SignalState, Supervisor

    adopt_orphans()
    wish, locked = SignalState(), dict[Path, int | None]()
    folder = _asked_folder(command)
    steps: list[int | None] = []
    extra: list[str] = []
    while True:
        # Orphans become this process's children, so that its tree holds all that was started.
        launcher = subprocess.Popen(
            [*command, *extra], stdin=subprocess.DEVNULL, start_new_session=True
        )
        life = Supervisor(ProcessTree(psutil.Process()), wish, launcher=launcher, locked=locked)
        code = life.run()
        folder = life.folder or folder
        if code in FINAL or wish.signal is not None or not restarts:
            return code
        steps.append(life.last_step)
        if why := _why_no_restart(steps, restarts):
            say(f"exit code {code}, and no other restart: {why}")
            if folder is not None and folder.is_dir():
                record(folder, {"gave_up": why})
            return code
        extra = _to_resume(folder)
        seconds = min(backoff * 2 ** (len(steps) - 1), MAX_BACKOFF)
        say(
            f"exit code {code} after step {steps[-1]}; restart {len(steps)} of {restarts} in "
            f"{seconds:g} s, with {' '.join(extra) or 'nothing to resume from'}"
        )
        _write_restart(folder, life, code, seconds)
        if not _sleep(seconds, wish):
            return 128 + (wish.signal or 0)


def attach(folder: Path) -> int:
    """Watch a run that goes already, until it ends; the run does not need this process."""
    from nsa.watchdog.process_tree import ProcessTree
    from nsa.watchdog.supervisor import SignalState, Supervisor, lock, read_ranks

    folder = folder.resolve()
    held = lock(folder)
    if held is None:
        raise ValueError(f"{folder} is watched already; nsa watch --status {folder} shows the run")
    life = Supervisor(ProcessTree(), SignalState(), folder=folder, locked={folder: held})
    patience = time.monotonic() + WatchConfig().setup
    while not life.ranks:
        life.look()
        beats = read_ranks(folder)
        if life.ranks:
            break
        if beats:
            return _tell_end(folder, beats)
        if time.monotonic() > patience:
            raise ValueError(
                f"{folder} has no heartbeats; it has not begun, or monitor.heartbeat is 0"
            )
        time.sleep(_POLL)
    say(f"{folder}: watching ranks {', '.join(map(str, life.ranks))}")
    return life.run()


def status_lines(folder: Path) -> list[str]:
    """A table of where a run's ranks are, for people."""
    from nsa.watchdog.process_tree import holder
    from nsa.watchdog.supervisor import read_ranks

    beats = read_ranks(folder)
    if not beats:
        return [f"{folder}: no heartbeats"]
    columns = ("rank", "phase", "since", "step", "line", "loss", "memory", "process")
    rows = [columns]
    for number, beat in beats.items():
        here = beat.get("host") == platform.node()
        process = holder(int(beat["pid"]), folder / f"heartbeat_rank{number}.jsonl")
        lives = "lives" if process else "is gone" if here else f"on {beat.get('host')}"
        ended = f"ended: {beat.get('status')}"
        clock = (time.monotonic(), beat["mono"]) if process else (time.time(), beat["time"])
        loss, memory = beat.get("loss"), beat.get("memory_gb")
        rows.append(
            (
                str(number),
                str(beat["phase"]),
                f"{beat['since']:.0f} s",
                f"{beat['step']:,.0f}",
                f"{clock[0] - clock[1]:.0f} s ago",
                "-" if loss is None else f"{loss:.4f}",
                "-" if memory is None else f"{memory:.2f} GB",
                ended if beat["event"] == "end" else f"{int(beat['pid'])} {lives}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _tell_end(folder: Path, beats: dict[int, dict[str, Any]]) -> int:
    """What to make of a run that nobody is at work on."""

    far = {str(beat.get("host")) for beat in beats.values()} - {platform.node()}
    if far and any(beat["event"] != "end" for beat in beats.values()):
        raise ValueError(f"{folder}: its ranks run on {', '.join(sorted(far))}; watch it there")
    dead = [number for number, beat in beats.items() if beat["event"] != "end"]
    if dead:
        steps = max(int(beat["step"]) for beat in beats.values())
        say(f"{folder} is over: rank {dead[0]} died without a word, after step {steps} at most")
        return 1
    ends = sorted({str(beat.get("status")) for beat in beats.values()})
    say(f"{folder} has ended: {', '.join(ends)}")
    return 0


def _why_no_restart(steps: Sequence[int | None], restarts: int) -> str:
    """Why another start would be no use, given the last step of each so far; empty: it may be."""
    if len(steps) > 1 and steps[-1] == steps[-2]:
        where = "before the first heartbeat" if steps[-1] is None else f"after step {steps[-1]}"
        return f"a crash loop, it ended {where} twice in a row"
    return f"all {restarts} are used up" if len(steps) > restarts else ""


def _asked_folder(command: Sequence[str]) -> Path | None:
    """The folder that a command names itself."""
    folder = None
    for word, value in zip(command, [*command[1:], ""], strict=True):
        if word == "--run-dir" and value:
            folder = Path(value)
        elif word.startswith("--run-dir="):
            folder = Path(word.partition("=")[2])
    return folder


def _to_resume(folder: Path | None) -> list[str]:
    """What a recipe has to be told to go on in `folder`; it refuses --resume where no run is."""
    if folder is None:
        return []
    begun = (folder / "config.yaml").exists() or (folder / "checkpoints").exists()
    return [*(["--resume"] if begun else []), "--run-dir", str(folder.resolve())]


def _write_restart(folder: Path | None, life: Supervisor, code: int, seconds: float) -> None:
    if folder is None or not folder.is_dir():
        return
    reason = life.verdict.reason if life.verdict else f"it ended with exit code {code}"
    restart = {
        "time": time.time(),
        "reason": reason,
        "exit_code": code,
        "step": life.last_step,
        "back_off": seconds,
    }
    record(folder, {"restarts": [*read_halt(folder).get("restarts", []), restart]})


def _sleep(seconds: float, wish: SignalState) -> bool:
    """Sleep; False where a signal came first."""
    deadline = time.monotonic() + seconds
    while wish.signal is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(_POLL, left))
    return wish.signal is None
