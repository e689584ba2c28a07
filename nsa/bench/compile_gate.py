"""Compile kernel launches for several chips and check shared memory, spills and tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import triton

from nsa.bench.compiled import CHIPS, Facts, Variant, compile_variant
from nsa.bench.kernel_launches import Case
from nsa.ops.triton.launch import Launch

# Bytes spilled per thread. 24 registers, such as pointers and bounds saved around a loop, cost
# nothing measurable; more means that a part of a tile is spilled: the tile is too large.
MAX_SPILLED = 96
MAX_SPILLED_FIRST = 24  # what runs where nothing was tuned: at most six registers
# float32, for checks only: its products take three passes, so heads above 128 spill with any tile.
MAX_SPILLED_FP32 = 320

_COLUMNS = "{:<26} {:<58} {:>14} {:<6} {:>9} {:>4} {:>6} {:>6} {:>6} {:>7}  {}"
_HEADER = _COLUMNS.format(
    "kernel",
    "call",
    "config",
    "chip",
    "shared KB",
    "regs",
    "spill",
    "tensor",
    "async",
    "blocks",
    "",
)


def check(
    launches: Iterable[tuple[Case, Launch, str]], jobs: int = 1, max_spilled: int = MAX_SPILLED
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compile each distinct launch for its chip, print a table; return its rows and failures."""
    assert not triton.knobs.runtime.interpret, "interpreted kernels cannot be compiled"
    distinct: dict[str, tuple[Variant, Case, Launch]] = {}
    for case, launch, chip in launches:
        variant = Variant.of(launch, chip)
        distinct.setdefault(repr(variant), (variant, case, launch))
    print(_HEADER)
    rows, failures = [], []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        over: Callable[..., Iterable[Any]] = map if jobs == 1 else pool.map
        variants = [variant for variant, _, _ in distinct.values()]
        compiled = zip(distinct.values(), over(_try_compile, variants), strict=True)
        for (variant, case, launch), facts in compiled:
            config = str(launch.config)
            if isinstance(facts, str):
                errors, figures = [f"does not compile: {facts}"], {}
            else:
                errors, figures = _exceeded(facts, variant.chip, case, max_spilled), asdict(facts)
            print(_line(variant, case, config, facts, errors), flush=True)
            failures += [f"{variant.kernel} {case} {config} {variant.chip}: {x}" for x in errors]
            names = {"kernel": variant.kernel, "chip": variant.chip, "config": config}
            call = asdict(case) | {"spec": case.pattern}
            rows.append({**names, **call, **figures, "failures": errors})
    print(f"{len(rows)} compiled, {len(failures)} failures", *failures, sep="\n")
    return rows, failures


def _exceeded(facts: Facts, chip_name: str, case: Case, max_spilled: int) -> list[str]:
    chip = CHIPS[chip_name]
    if case.dtype == "fp32" and max(case.key, case.value) > 128:
        max_spilled = MAX_SPILLED_FP32
    errors = [
        f"{figure:,} {what}, limit {limit:,}"
        for what, figure, limit in (
            ("bytes of shared memory a block", facts.shared, chip.shared),
            ("columns of tensor memory a block", facts.tensor_memory, chip.tensor_memory),
            ("bytes spilled a thread", facts.spilled, max_spilled),
            ("matrix products without tensor cores", facts.plain_products, 0),
            ("products whose operand is overwritten while they run", facts.overwritten, 0),
        )
        if figure > limit
    ]
    # A single position sees no compressed block: the compiler drops its products.
    if facts.products and not facts.tensor_core and case.seq_len > 1:
        errors.append("matrix products, and no tensor-core instruction")
    return errors


def _try_compile(variant: Variant) -> Facts | str:
    try:
        return compile_variant(variant)
    except Exception as error:  # any compiler error is this variant's failure
        return " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())


def _line(variant: Variant, case: Case, config: str, facts: Facts | str, errors: list[str]) -> str:
    figures: tuple[object, ...] = ("",) * 6
    if isinstance(facts, Facts):
        shared = f"{facts.shared / 1024:.1f}"
        products = facts.tensor_core, facts.asynchronous
        figures = shared, facts.registers, facts.spilled, *products, facts.blocks_per_sm
    words = variant.kernel, str(case), config, variant.chip, *figures, "; ".join(errors)
    return _COLUMNS.format(*words)
