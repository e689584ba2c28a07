"""Entry point of every recipe: parse the command line, train or dry-run, exit with a code."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from nsa.data.worker import WorkerDied
from nsa.engine.command_line import build_parser, resolve_request
from nsa.engine.cpu_collectives import AllRanksCrash, RunAborted
from nsa.engine.run_dir import FolderLock
from nsa.engine.run_request import Recipe
from nsa.text import as_one_line, printable
from nsa.validation import reject_unknown_flags

__all__ = ["Recipe", "main"]

CRASHED, REFUSED, ABORTED = 1, 2, 3  # exit codes
RANK_0_REPORT_SECONDS = 10  # for rank 0 to report an error before another rank does


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> None:
    """Run `recipe` with the flags in `arguments` (default: sys.argv).

    Exit codes: 0 finished or preempted, 1 crashed, 2 refused with a one-line error, 3 No-Go.
    """
    gc.freeze()  # garbage collections skip the imported modules: starts a second sooner
    parser = build_parser(recipe)
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        reject_unknown_flags(parser, unknown)
    lock = None
    try:
        request = resolve_request(recipe, flags)
        if int(os.environ.get("RANK", 0)) == 0:
            lock = FolderLock(request.run_dir)
    except (ValueError, OSError) as error:
        refusal = as_one_line(error) if isinstance(error, OSError) else error
        _exit_with_error(recipe, refusal, REFUSED)
    from nsa.engine.process_group import crash

    try:
        if flags.dry_run:
            from nsa.engine.trainer import dry_run

            if lock is not None:
                lock.undo()
            dry_run(request)
        else:
            from nsa.engine.trainer import start

            start(request, lock)
    except RunAborted as error:
        _exit_with_error(recipe, error, ABORTED)
    except (AllRanksCrash, WorkerDied) as error:
        _exit_with_error(recipe, error, CRASHED)
    except ValueError as error:
        _exit_with_error(recipe, error, REFUSED)
    except BaseException as error:
        crash(error)


def _exit_with_error(recipe: Recipe, error: Exception, code: int) -> NoReturn:
    """Print one line for all ranks and exit with `code`.

    Rank 0 prints it and exits; the launcher then ends the other ranks. They wait for that, because
    the launcher would end rank 0 if they exited first. After RANK_0_REPORT_SECONDS a rank assumes
    that it alone has an error, and prints it.
    """
    from nsa.engine.process_group import end_process

    if int(os.environ.get("RANK", 0)) != 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))  # sent by the launcher
        time.sleep(RANK_0_REPORT_SECONDS)
    text = printable(str(error), keep="\n")
    print(f"{recipe.name}: {text}", file=sys.stderr, flush=True)
    end_process(code)
