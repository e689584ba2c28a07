"""The faults that are tried, and what a run promises to do about each."""

from __future__ import annotations

ONE_LINE = "Refused in one line that names the fix, with exit code 2."
GOES_ON = "Ends with exit code 1; the resumed run repeats the uninterrupted one."
UNHARMED = "The run does not notice."

# Name of the fault: what is done, and what is promised.
FAULTS: dict[str, tuple[str, str]] = {
    "kill-rank": ("`kill -9` of one rank, in each phase and within a save", GOES_ON),
    "kill-any-time": ("`kill -9` of one rank or of all, at a random moment", GOES_ON),
    "kill-launched": (
        "`kill -9` of a rank under `nsa watch --restart` and DeepSpeed's launcher",
        "Started again from the newest checkpoint; it ends with exit code 0.",
    ),
    "kill-launcher": (
        "`kill -9` of DeepSpeed's launcher",
        "Its ranks finish the step, save and end; the resumed run repeats the uninterrupted one.",
    ),
    "crash": ("an exception on one rank", GOES_ON + " The traceback is that rank's own."),
    "wrong-token": ("a token that the vocabulary does not have, on one rank", GOES_ON),
    "hang": (
        "a rank that hangs: in the loader, in forward, before a collective",
        "`nsa watch` ends it, keeps its stacks and says where each rank was; the resumed run "
        "repeats the uninterrupted one.",
    ),
    "stop": (
        "a rank that is stopped (`kill -STOP`): none of its threads lives",
        "As for a rank that hangs.",
    ),
    "nan-skip": (
        "a loss or gradient of NaN or inf on one rank, `train.on_bad_step=skip`",
        "The step is left out on all ranks, counted and said; the run finishes.",
    ),
    "nan-abort": (
        "the same, `train.on_bad_step=abort`",
        "Exit code 3 and a checkpoint; resumed, it goes on as if it had skipped the step.",
    ),
    "nan-rollback": (
        "the same, `train.on_bad_step=rollback`",
        "Back to the newest checkpoint; the bad samples are passed over; the run finishes.",
    ),
    "damage": (
        "each file of the newest checkpoint truncated, with a bit flipped, deleted",
        "The damage is found and named; the run goes on from the one before and repeats the "
        "uninterrupted one.",
    ),
    "disk-full": (
        "a disk that fills up while the run goes",
        "Training goes on and says what was not saved; the earlier checkpoint stays good.",
    ),
    "read-only": ("a disk that turns read-only while the run goes", "As for a full disk."),
    "clock": ("a clock that jumps an hour back or on, on one rank", UNHARMED),
    "signal": (
        "SIGTERM or SIGINT in each phase, to one rank or to all",
        'The step is finished and saved, exit code 0, "preempted"; the resumed run repeats the '
        "uninterrupted one.",
    ),
    "heartbeat": ("rubbish in a rank's heartbeat file", UNHARMED + " Nor does `nsa watch`."),
    "two-runs": ("a second run in the same folder", ONE_LINE + " The first goes on."),
    "json": ("each kind of mistake in DeepSpeed's JSON", ONE_LINE),
}
