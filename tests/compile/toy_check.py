"""Run the compile check on toy kernels and on some real ones, and write the results as JSON.

A separate program because the tests' process uses Triton's interpreter.
"""

from __future__ import annotations

import importlib
import io
import json
import pkgutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.compiler import CompiledKernel

import nsa.ops.triton
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import launch, recording
from tests.bench.__main__ import main as bench
from tests.compile import check as compile_check
from tests.compile import launches as kernel_launches
from tests.compile import toys
from tests.compile.check import CHIPS, Variant
from tests.compile.launches import OPERATIONS, SUBSET, Case, record_launches

CASE = Case("toy", 1, 1, 64, 64, 1000, "bf16", False)


def main() -> None:
    """Write the check's results by name."""
    single = torch.float32
    plain = partial(toys.attention, Config(64, 64, 4, 2))
    crowded = partial(toys.attention, Config(64, 64, 1, 1))
    three = partial(toys.attention, Config(16, 32, 4, 1), single, precision="tf32x3")
    ieee = partial(toys.attention, Config(16, 32, 4, 1), single, precision="ieee")
    odd = partial(toys.attention, Config(64, 48, 4, 1))
    blind = partial(toys.attention, Config(64, 64, 4, 2), keys=1)
    results = {
        "good": check(plain, plain, chips=tuple(CHIPS)),
        "in three passes": check(three),
        "deep": check(toys.too_deep),
        "crowded": check(crowded),
        "without tensor cores": check(ieee),
        "not a power of two": check(odd, plain),
        # AMD's compiler keeps the products.
        "no key": check(blind, case=replace(CASE, seq_len=1), chips=("sm_80", "sm_100")),
        "many warps": check(thirty_two_warps, chips=("sm_80", "gfx942")),
        "sample": sample(),
        "serialised": check(toys.serialised, chips=("sm_80", "sm_90")),
        "signatures": {"check": from_the_check(), "launch": from_a_launch()},
        "found in the cache": found_in_the_cache(),
        "real": one_launch_of_each_kernel(),
        "kernels": kernels(),
        "recompiled": recompiled(),
        "relaunched": relaunched(),
        "refusals": [
            refusal("--arch", "sm_85"),
            refusal("--operation", "attend"),
        ],
        "exit code": exit_code_of_a_failure(),
    }
    Path(sys.argv[1]).write_text(json.dumps(results))


def check(
    *starts: Callable[[], None], case: Case = CASE, chips: tuple[str, ...] = ("sm_80",)
) -> dict[str, Any]:
    """Run the compile check on these launches."""
    with recording() as launches:
        for start in starts:
            start()
    return check_launches([(case, launch) for launch in launches], chips)


def check_launches(
    launches: list[tuple[Case, Any]],
    chips: tuple[str, ...],
    max_spilled: int = compile_check.MAX_SPILLED,
) -> dict[str, Any]:
    for_chips = [(*one, chip) for one in launches for chip in chips]
    rows, failures = compile_check.check(for_chips, max_spilled=max_spilled)
    return {"rows": rows, "failures": failures}


def exit_code_of_a_failure() -> object:
    """The command's exit code when an operation has too large a kernel."""
    OPERATIONS["toy"] = lambda case: toys.too_deep()
    try:
        bench(["aot", "--operation", "toy", "--arch", "sm_80", "--jobs", "1"])
    except SystemExit as end:
        return end.code
    return 0


def thirty_two_warps() -> None:
    arguments = toys.every_kind_of_argument("meta")
    launch(toys.take_all, (1,), Config(1, 1, 32, 1), **arguments, WIDTH=32)


def sample() -> dict[str, Any]:
    """Decoding, whose kernels compile fast, for a chip that only `--full` compiles for."""
    case = Case("decode_attention", *SUBSET[0], "bf16", False)
    chip = "gfx942"
    for_chips = [(case, recorded, chip) for recorded in record_launches(case, 1, chip)]
    rows, failures = compile_check.check(for_chips, max_spilled=compile_check.MAX_SPILLED_FIRST)
    return {"rows": rows, "failures": failures}


def one_launch_of_each_kernel() -> dict[str, Any]:
    """On an A100, with M7C's shape where that launches it."""
    launches: dict[str, tuple[Case, Any]] = {}
    for case in kernel_launches.cases("first", OPERATIONS):
        for recorded in record_launches(case, 1):
            launches.setdefault(recorded.kernel.fn.__name__, (case, recorded))
    return check_launches([*launches.values()], ("sm_80",), compile_check.MAX_SPILLED_FIRST)


def kernels() -> dict[str, list[str]]:
    """The library's kernels, and those that the check's cases launch."""
    modules = [
        importlib.import_module(f"nsa.ops.triton.{module.name}")
        for module in pkgutil.iter_modules(nsa.ops.triton.__path__)
    ]
    library = {x.fn.__name__ for m in modules for x in vars(m).values() if is_kernel(x)}
    cases = kernel_launches.cases("first", OPERATIONS)
    launched = {x.kernel.fn.__name__ for case in cases for x in record_launches(case)}
    return {"library": sorted(library), "check": sorted(launched)}


def is_kernel(x: object) -> bool:
    """Whether a launcher starts it; functions that kernels call have other names."""
    return isinstance(x, triton.JITFunction) and x.fn.__name__.endswith("_kernel")


def recompiled() -> list[str]:
    """The kernels that are compiled again for another number of packed documents."""
    case = Case("nsa_attention", *SUBSET[0], "bf16", True)
    known: dict[str, Variant] = {}
    new = []
    for documents in (kernel_launches.DOCUMENTS, 1, 16, 37):
        with mock.patch.object(kernel_launches, "DOCUMENTS", documents):
            variants = {
                repr(v): v for x in record_launches(case, 1) for v in [Variant.of(x, "sm_90")]
            }
        new += [variants[key].kernel for key in variants.keys() - known] if known else []
        known |= variants
    return new


def refusal(*flags: str) -> str:
    """The error of a call, which argparse prints and `run` raises."""
    with redirect_stderr(io.StringIO()) as printed:
        try:
            bench(["aot", *flags])
        except ValueError as error:
            return str(error)
        except SystemExit:
            return printed.getvalue()
    return ""


def variant_of_all() -> Variant:
    """The check's variant of a launch with `meta` tensors."""
    with recording() as launches:
        arguments = toys.every_kind_of_argument("meta")
        launch(toys.take_all, (1,), Config(1, 1, 4, 2), **arguments, WIDTH=32)
    return Variant.of(launches[0], "sm_80")


def from_the_check() -> list[str]:
    """What the check passes to Triton for it."""
    source = variant_of_all().source()
    return [repr(x) for x in (source.signature, source.constants, source.attrs)]


class Device:
    """The part of a GPU driver that Triton uses before it compiles."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: triton.backends.compiler.GPUTarget("cuda", 80, 32))


def found_in_the_cache() -> list[bool]:
    """Whether a launch hits the cache: one that the check compiled, and another."""
    compile_check.compile_variant(variant_of_all())
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
    triton.runtime.driver.set_active(Device())
    for width in (32, 16):
        arguments = toys.every_kind_of_argument("cpu")
        toys.take_all.warmup(**arguments, WIDTH=width, num_warps=4, num_stages=2, grid=(1,))
    triton.knobs.compilation.listener = None
    return hits


def relaunched() -> dict[str, Any]:
    """The binaries that ran, by hash, with grid and arguments: by Triton alone, and by `launch`.

    Each set of arguments comes twice. Only the start on a GPU is left out.
    """
    given = toys.every_kind_of_argument("cpu")
    x = given["x"]
    others = {"x": [x[1:], x[8:], x.half(), x.float()], "one": [2, 16, 2**40], "nothing": [x]}
    others |= {"sixteens": [1, 17], "scale": [0.25]}
    sets = [given, *({**given, name: y} for name, ys in others.items() for y in ys)]
    configs = Config(1, 1, 4, 2), Config(1, 1, 4, 2, maxnreg=64)
    ran: list[Any] = []
    looked_up: list[None] = []

    def without_a_gpu(binary: CompiledKernel) -> None:
        binary._run = lambda *launched: ran.append(
            [
                binary.hash,
                *launched[:3],
                *(y.data_ptr() if isinstance(y, torch.Tensor) else y for y in launched[9:]),
            ]
        )

    def by_triton(arguments: dict[str, Any], config: Config) -> None:
        toys.take_all[(3, 2)](**arguments, WIDTH=32, **config.options())

    def by_launch(arguments: dict[str, Any], config: Config) -> None:
        launch(toys.take_all, (3, 2), config, **arguments, WIDTH=32)

    triton.runtime.driver.set_active(Device())
    toys.take_all.pre_run_hooks.append(lambda *_, **__: looked_up.append(None))
    with mock.patch.object(CompiledKernel, "_init_handles", without_a_gpu):
        for run in (by_triton, by_launch):
            for config in configs:
                for arguments in [*sets, *sets]:
                    run(arguments, config)
    toys.take_all.pre_run_hooks.clear()
    half = len(ran) // 2
    return {"by triton": ran[:half], "by launch": ran[half:], "looked up": len(looked_up) - half}


def from_a_launch() -> list[str]:
    """What Triton would compile for a launch with real tensors."""
    hooked: list[dict[str, Any]] = []

    def skip_compiling(*, compile: dict[str, Any], **_: Any) -> bool:
        hooked.append(compile)
        return True

    triton.runtime.driver.set_active(Device())
    triton.knobs.runtime.jit_cache_hook = skip_compiling
    toys.take_all[(1,)](**toys.every_kind_of_argument("cpu"), WIDTH=32, num_warps=4, num_stages=2)
    triton.knobs.runtime.jit_cache_hook = None
    return [
        repr(x) for x in (hooked[0]["signature"], hooked[0]["constants"], *hooked[0]["configs"])
    ]


if __name__ == "__main__":
    main()
