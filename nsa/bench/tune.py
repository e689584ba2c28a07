"""`python -m nsa.bench tune`: time every candidate for the kernels' tile sizes, keep the fastest.

If several libraries have a kernel for an operation, which one runs is chosen in the same way.
Choices are stored per operation, head sizes, dtype and class of length (short or long), so
everything that shares such a key is timed together: all shapes with these head sizes, all lengths
of a class.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nsa.bench.implementations import PARTS, Inputs, nsa_functions
from nsa.bench.options import Shape, add_gpu_flags
from nsa.bench.results import Report, Result, cell, figure, print_table
from nsa.bench.timing import Step
from nsa.ops import NSASpec
from nsa.ops.decode import decode_attention
from nsa.ops.triton.configs import SHORT, Config, override_choices, save_tuned, tuning_key
from nsa.ops.triton.launch import Launch, launch, padded_size, recording

SPEC = NSASpec()
JOINT = "nsa_attention"
Option = Config | str  # tile sizes, or the library whose kernel runs


@dataclass
class TunedOperation:
    """An operation's candidates, and the calls that run it."""

    options: list[Any]
    steps: dict[str, Step]


def add_flags(parser: argparse.ArgumentParser) -> None:
    shapes = "m7c,16x4x64,64x4x128,paper"
    add_gpu_flags(parser, "2k,16k", shapes_default=shapes, tokens=32_768)


def run(report: Report) -> None:
    """Tune the operations of every shape; print a table, store the fastest configs for launches."""
    flags = report.flags
    report.data["kept_in"] = None
    by_sizes: dict[tuple[int, int], list[Shape]] = {}
    for shape in flags.shapes:
        by_sizes.setdefault((padded_size(shape.key), padded_size(shape.value)), []).append(shape)
    classes = [[n for n in flags.lengths if (n <= SHORT) == short] for short in (True, False)]
    for sizes, shapes in by_sizes.items():
        for lengths in filter(None, classes):
            case = partial(_case, sizes, shapes, lengths, report)
            report.attempt(f"head sizes {sizes[0]}x{sizes[1]}, {max(lengths):,} tokens", case)
    if report.data["rows"]:
        print_rows(report.data["rows"])
    else:
        print(f"--backend {report.backend}: none of its operations has candidates to choose from")


def _case(sizes: tuple[int, int], shapes: list[Shape], lengths: list[int], report: Report) -> None:
    steps = _steps(shapes, lengths, report)
    # nsa_attention has kernels of its own; those of the other functions are tuned by their calls.
    joint = {name: steps.pop(name) for name in list(steps) if name.startswith(JOINT)}
    rows, best = tune(discover(joint) | discover(steps), report)
    keys = partial(key_of, sizes=sizes, dtype=report.dtype, seq_len=lengths[0])
    for row in rows:
        report.add({"key": keys(row["operation"]), **row})
    if best:
        options = {keys(name): option for name, option in best.items()}
        report.data["kept_in"] = str(save_tuned(options))


def key_of(operation: str, sizes: tuple[int, int], dtype: torch.dtype, seq_len: int) -> str:
    """Return the key that a launch looks up; selection has no values, decoding one length class."""
    if operation == "select":
        sizes = sizes[0], 0
    if operation == "gathered_decode":
        seq_len = SHORT
    return tuning_key(operation, sizes, dtype, seq_len)


def _steps(shapes: list[Shape], lengths: list[int], report: Report) -> dict[str, Step]:
    """Return calls of every function at every shape and length, and of a decoding step."""
    steps: dict[str, Step] = {}
    backend = report.backend
    for shape in shapes:
        for seq_len in lengths:
            batch = max(1, report.flags.tokens // seq_len)
            inputs = Inputs.random(shape, batch, seq_len, SPEC, report.device, report.dtype)
            by_name = nsa_functions(inputs, SPEC, backend)
            for name in (*PARTS, JOINT):
                steps[f"{name} {shape} T={seq_len}"] = by_name[name].step
            # Trained queries select somewhere between random and local.
            local = nsa_functions(inputs.local(SPEC), SPEC, backend)["selected_attention"]
            steps[f"local selected_attention {shape} T={seq_len}"] = local.step
            if report.flags.lengths[0] in lengths:  # once, for all lengths of a cache
                steps[f"decode_attention {shape} T={seq_len}"] = _decoding(inputs, backend)
    return steps


def _decoding(inputs: Inputs, backend: str) -> Step:
    """Return a step that decodes the last position of each sequence, after all others."""
    q, gates = inputs.q[:, -1], inputs.gates[:, -1]
    lengths = torch.full((len(q),), inputs.q.shape[1], device=q.device)
    return lambda: decode_attention(q, *inputs[1:7], gates, lengths, SPEC, backend=backend)


def discover(steps: Mapping[str, Step]) -> dict[str, TunedOperation]:
    """Run each call once and collect the operations that it launches."""
    operations: dict[str, TunedOperation] = {}

    def note(label: str, name: str, options: list[Any]) -> Any:
        operations.setdefault(name, TunedOperation(options, {})).steps[label] = steps[label]
        return options[0]

    for label, step in steps.items():
        with override_choices(partial(note, label)):
            step()
    return operations


def tune(
    operations: Mapping[str, TunedOperation], report: Report
) -> tuple[list[dict[str, Any]], dict[str, Option]]:
    """Time the candidates of each operation that has several; return rows and the fastest.

    Each operation's calls run once as a whole, with the fastest candidates so far. After that, only
    the kernels that take the candidate are timed, on the tensors of that first run.
    """
    rows = []
    best: dict[str, Option] = {}
    for name, operation in operations.items():
        options = {str(option): option for option in operation.options}
        if len(options) == 1:
            continue
        steps = {
            label: _relaunching(name, option, best, operation) for label, option in options.items()
        }
        results: dict[str, Result] = {
            label: {"config": _fields(option), "ms": None, "errors": {}}
            for label, option in options.items()
        }
        report.time(steps, results, "ms")
        timed = {label: x["ms"]["median"] for label, x in results.items() if x["ms"]}
        if timed:
            best[name] = options[min(timed, key=timed.__getitem__)]
        row = {"operation": name, "calls": list(operation.steps), "candidates": [*results.values()]}
        rows.append(row | {"best": _fields(best[name]) if timed else None})
    return rows, best


def _relaunching(
    name: str, option: Option, best: Mapping[str, Option], operation: TunedOperation
) -> Step:
    """Run the operation's calls once with `option`, then only the launches that take it.

    A call of another library has no launches to repeat, so it always runs as a whole.
    """
    # A new tuple, to distinguish its launches from those of others with equal tile sizes.
    option = Config(*option) if isinstance(option, Config) else option
    launches: list[Launch] = []

    def choice(operation_name: str, options: list[Any]) -> Any:
        return option if operation_name == name else best.get(operation_name, options[0])

    def step() -> None:
        for x in launches:
            launch(x.kernel, x.grid, x.config, **x.arguments, **x.constants)
        if launches:
            return
        with override_choices(choice), recording(dry=False) as recorded:
            for call in operation.steps.values():
                call()
        launches.extend(x for x in recorded if x.config is option)

    return step


def _fields(option: Option) -> dict[str, Any]:
    return {"by": option} if isinstance(option, str) else option._asdict()


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a line per candidate."""
    lines = [["operation, sizes, dtype, length", "rows/keys/warps/stages/registers", "ms", ""]]
    errors: dict[str, Result] = {}
    for row in rows:
        for candidate in row["candidates"]:
            ms, config = figure(candidate, "ms"), candidate["config"]
            verdict = "kept" if config == row["best"] else "" if ms else "fails"
            option = "/".join(str(number) for number in config.values() if number is not None)
            lines.append([row["key"], option, cell(ms), verdict])
            errors[f"{row['key']} {option}"] = candidate
    print_table(lines, errors)
