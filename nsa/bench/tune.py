"""`python -m nsa.bench tune`: times every candidate for the kernels' tile sizes, keeps the fastest.

Whose kernel is taken, where there are several, is one more operation with candidates.

What is kept is keyed by operation, head sizes and dtype. So everything that shares a key is timed
together: both branches that a kernel serves, all the shapes with these head sizes, all lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from nsa.bench.calls import Chosen, calls
from nsa.bench.contenders import Contender
from nsa.bench.gpu import Step, take_turns
from nsa.bench.inputs import Inputs
from nsa.bench.report import Report, shown, table
from nsa.bench.shapes import PARTS, Shape
from nsa.ops import NSASpec
from nsa.ops.decode import decode_attention
from nsa.ops.triton.configs import Config, choosing, keep_tuned, tuning_key

SPEC = NSASpec()


Option = Config | str  # tile sizes, or whose kernel


@dataclass
class Asked:
    """An operation that some calls start: its candidates, and those calls by name."""

    options: list[Any]
    steps: dict[str, Step]


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Tune the operations of every shape; prints a table, and writes what a launch will read."""
    report = Report(flags)
    backend = flags.backend or ("triton" if report.device.type == "cuda" else "blockwise")
    report.data["settings"]["backend"] = backend
    report.data["kept_in"] = None
    for sizes, shapes in _by_sizes(flags.shapes).items():
        case = partial(_case, sizes, shapes, backend, report)
        report.attempt(f"head sizes {sizes[0]}x{sizes[1]}", case)
    if report.data["rows"]:
        _show(report.data["rows"])
    else:
        print(f"backend {backend}: none of its operations has candidates to choose from")
    return report.finish()


def _case(sizes: tuple[int, int], shapes: list[Shape], backend: str, report: Report) -> None:
    chosen = {}
    for operation, asked, candidates, best in tune(
        discover(_steps(shapes, backend, report)), report
    ):
        key = key_of(operation, sizes, report.dtype)
        if best is not None:
            chosen[key] = best
        report.add(_row(key, asked, candidates, best))
    if chosen:
        report.data["kept_in"] = str(keep_tuned(chosen))


def _by_sizes(shapes: list[Shape]) -> dict[tuple[int, int], list[Shape]]:
    """Shapes that share a key, by the sizes in it."""
    found: dict[tuple[int, int], list[Shape]] = {}
    for shape in shapes:
        found.setdefault((_padded(shape.key), _padded(shape.value)), []).append(shape)
    return found


def _padded(size: int) -> int:
    """As kernels take a head: a power of two, 16 or more."""
    return max(16, 1 << (size - 1).bit_length())


def key_of(operation: str, sizes: tuple[int, int], dtype: torch.dtype) -> str:
    """What a launch looks its choice up by; choosing blocks knows no values."""
    return tuning_key(operation, (sizes[0], 0) if operation == "select" else sizes, dtype)


def _steps(shapes: list[Shape], backend: str, report: Report) -> dict[str, Step]:
    """Every function of nsa.ops at every shape and length, forward and backward, and a token."""
    steps: dict[str, Step] = {}
    for shape in shapes:
        for seq_len in report.flags.lengths:
            batch = max(1, report.flags.tokens // seq_len)
            inputs = Inputs.of(shape, batch, seq_len, SPEC, report.device, report.dtype)
            by_name = calls(inputs, Chosen.of(inputs, SPEC, backend), SPEC, backend)
            # Between these two ends is where trained queries choose: alone, and with neighbours.
            alike = inputs.local(SPEC)
            local = calls(alike, Chosen.of(alike, SPEC, backend), SPEC, backend)
            by_name["local selected_attention"] = local["selected_attention"]
            for name in (*PARTS, "local selected_attention"):
                call = by_name[name]
                one = Contender(call.function, *call.tensors, learns=call.learns)
                step = one.both if call.learns else one.forward
                steps[f"{name} {shape.name} T={seq_len}"] = step
            steps[f"decode_attention {shape.name} T={seq_len}"] = _token(inputs, backend)
    return steps


def _token(inputs: Inputs, backend: str) -> Step:
    """The last position of each sequence, as a token behind a cache of the others."""
    lengths = torch.full((len(inputs.q),), inputs.q.shape[1], device=inputs.q.device)
    x = inputs
    pairs = x.k_cmp, x.v_cmp, x.k_sel, x.v_sel, x.k_win, x.v_win
    return lambda: decode_attention(
        x.q[:, -1], *pairs, x.gates[:, -1], lengths, SPEC, backend=backend
    )


def discover(steps: Mapping[str, Step]) -> dict[str, Asked]:
    """Which operations these calls start, by asking them."""
    found: dict[str, Asked] = {}

    def note(label: str, operation: str, options: list[Any]) -> Any:
        asked = found.setdefault(operation, Asked(options, {}))
        assert asked.options == options, "one key has one list of candidates"
        asked.steps[label] = steps[label]
        return options[0]

    for label, step in steps.items():
        with choosing(partial(note, label)):
            step()
    return found


Result = tuple[str, Asked, list[dict[str, Any]], Option | None]


def tune(found: Mapping[str, Asked], report: Report) -> list[Result]:
    """For each operation with a choice its candidates' times, and the fastest of them.

    The other operations have their best so far.
    """
    flags, results = report.flags, []
    best = {operation: asked.options[0] for operation, asked in found.items()}
    for operation, asked in found.items():
        options = {str(option): option for option in asked.options}
        if len(options) == 1:
            continue
        timings, failed = take_turns(
            {
                name: partial(_with, {**best, operation: option}, asked)
                for name, option in options.items()
            },
            report.device,
            seconds=flags.seconds,
            rounds=flags.rounds,
        )
        fastest = min(timings, key=lambda name: timings[name].median, default=None)
        chosen = None if fastest is None else options[fastest]
        best[operation] = chosen or best[operation]
        candidates = [
            {
                "config": _fields(option),
                "ms": asdict(timings[name]) if name in timings else None,
                "why_not": failed.get(name),
            }
            for name, option in options.items()
        ]
        results.append((operation, asked, candidates, chosen))
    return results


def _with(configs: Mapping[str, Option], asked: Asked) -> None:
    """Run the calls that start an operation, with these tile sizes."""
    with choosing(lambda operation, options: configs.get(operation, options[0])):
        for step in asked.steps.values():
            step()


def _row(
    key: str, asked: Asked, candidates: list[dict[str, Any]], best: Option | None
) -> dict[str, Any]:
    return {
        "key": key,
        "calls": list(asked.steps),
        "candidates": candidates,
        "chosen": None if best is None else _fields(best),
    }


def _fields(option: Option) -> dict[str, Any]:
    return {"by": option} if isinstance(option, str) else asdict(option)


def _show(rows: list[dict[str, Any]]) -> None:
    lines = [["operation, sizes, dtype", "rows", "keys", "warps", "stages", "ms", ""]]
    reasons = []
    for row in rows:
        for candidate in row["candidates"]:
            ms, config = candidate["ms"], candidate["config"]
            verdict = "kept" if config == row["chosen"] else "" if ms else "fails"
            numbers = [str(number) for number in config.values()]
            columns = [*numbers, "", "", ""][:4]
            lines.append([row["key"], *columns, shown(ms and ms["median"]), verdict])
            if candidate["why_not"]:
                reasons.append(f"  {row['key']} {'/'.join(numbers)}: {candidate['why_not']}")
    table(lines)
    print(*reasons, sep="\n", flush=True)
