"""The faults that are tested, and what a run promises under each."""

from __future__ import annotations

ONE_LINE = "Refused in one line that names the fix, with exit code 2."
EXACT = "the resumed run repeats the uninterrupted one."
RESUMABLE = f"Ends with exit code 1; {EXACT}"
UNAFFECTED = "The run is not affected."

# Name of the fault: (what happens, what is promised).
FAULTS: dict[str, tuple[str, str]] = {
    "kill-rank": ("`kill -9` of one rank, in each phase and during a save", RESUMABLE),
    "kill-any-time": ("`kill -9` of one rank or all, at a random moment", RESUMABLE),
    "kill-launched": (
        "`kill -9` of a rank under `nsa watch --restart` and DeepSpeed's launcher",
        "Restarted from the newest checkpoint; ends with exit code 0.",
    ),
    "kill-launcher": (
        "`kill -9` of DeepSpeed's launcher",
        f"Its ranks finish the step, save and exit; {EXACT}",
    ),
    "crash": ("an exception on one rank", f"{RESUMABLE} The traceback is that rank's."),
    "wrong-token": ("a token outside the vocabulary, on one rank", RESUMABLE),
    "hang": (
        "a rank that hangs: in the loader, in forward, before a collective",
        f"`nsa watch` ends it, keeps its stacks and logs where each rank was; {EXACT}",
    ),
    "stop": ("a rank that is stopped (`kill -STOP`), all of its threads", "As for a hang."),
    "nan-skip": (
        "a NaN or inf loss or gradient on one rank, `train.on_bad_step=skip`",
        "All ranks skip the step, which is counted and logged; the run finishes.",
    ),
    "nan-abort": (
        "the same, `train.on_bad_step=abort`",
        "Exit code 3 and a checkpoint; resumed, it continues as if it had skipped the step.",
    ),
    "damage": (
        "each file of the newest checkpoint truncated, with a bit flipped, deleted",
        f"The damage is detected and named; the checkpoint before it is used; {EXACT}",
    ),
    "disk-full": (
        "a disk that fills up during training",
        "Training continues and logs what was not saved; the earlier checkpoint stays valid.",
    ),
    "disk-hangs": (
        "a disk that hangs (`fsfreeze`) for longer than the watchdog's limits",
        "The run waits and continues, `nsa watch` reports it; no step or row is lost.",
    ),
    "read-only": ("a disk that turns read-only during training", "As for a full disk."),
    "deleted": (
        "the run's folder deleted during training",
        "The step is finished and saved, exit code 2 and one line; resumed, no step is lost.",
    ),
    "clock": ("a clock that jumps an hour back or forward, on one rank", UNAFFECTED),
    "signal": (
        "SIGTERM or SIGINT in each phase, to one rank or all",
        f'The step is finished and saved, exit code 0, "preempted"; {EXACT}',
    ),
    "heartbeat": ("garbage in a rank's heartbeat file", UNAFFECTED),
    "two-runs": ("a second run in the same folder", f"{ONE_LINE} The first continues."),
    "json": ("each kind of mistake in DeepSpeed's JSON", ONE_LINE),
}
