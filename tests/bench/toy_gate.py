"""Run the gate on small kernels and on some of the real ones; writes what it found as JSON.

A program of its own because the tests' own process has Triton's interpreter switched on.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

import nsa.ops.triton
from nsa.bench import aot, compiled
from nsa.bench.__main__ import main as bench
from nsa.bench.compiled import CHIPS, Variant
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import launch, recording
from tests.bench import toys

CASE = aot.Case("toy", 1, 1, 64, 64, 1000, "bf16", False)


def main() -> None:
    """Write {name: what the gate said}."""
    single = torch.float32
    plain = partial(toys.attention, Config(64, 64, 4, 2))
    crowded = partial(toys.attention, Config(64, 64, 1, 1), size=128)
    three = partial(toys.attention, Config(64, 32, 4, 1), single, precision="tf32x3")
    ieee = partial(toys.attention, Config(64, 32, 4, 1), single, precision="ieee")
    odd = partial(toys.attention, Config(64, 48, 4, 1))
    blind = partial(toys.attention, Config(64, 64, 4, 2), keys=1)
    found = {
        "good": check(plain, plain, chips=tuple(CHIPS)),
        "in three passes": check(three),
        "deep": check(toys.too_deep),
        "crowded": check(crowded),
        "without tensor cores": check(ieee),
        "not a power of two": check(odd, plain),
        "no key": check(blind, chips=tuple(CHIPS)),
        "overwritten": check(toys.overwritten, chips=("sm_80", "sm_90")),
        "assembler": [int(x) for x in triton.knobs.nvidia.ptxas.version.split(".")],
        "unknown instructions": with_unknown_instructions(plain),
        "signatures": {"gate": from_the_gate(), "launch": from_a_launch()},
        "found in the cache": found_in_the_cache(),
        "real": real(),
        "kernels": kernels(),
        "compiled anew": compiled_anew(),
        "refusals": [refusal(chips=["sm_85"]), refusal(operations=["attend"])],
        "exit code": exit_code_of_a_failure(),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


def check(*starts: Callable[[], None], chips: tuple[str, ...] = ("sm_80",)) -> dict[str, Any]:
    """What the gate says of the launches that these make."""
    with recording() as launches:
        for start in starts:
            start()
    return aot.check([(CASE, started) for started in launches], chips)


def with_unknown_instructions(start: Callable[[], None]) -> dict[str, Any]:
    """What the gate says where matrix units have instructions that it does not know."""
    with mock.patch.object(compiled, "TENSOR_CORE", re.compile("none of them")):
        return check(start, chips=tuple(CHIPS))


def exit_code_of_a_failure() -> object:
    """What the command ends with where one of the operations has too large a kernel."""
    aot.OPERATIONS["toy"] = lambda case: toys.too_deep()
    try:
        bench(["aot", "--operation", "toy", "--arch", "sm_80", "--jobs", "1"])
    except SystemExit as end:
        return end.code
    return 0


def real() -> dict[str, Any]:
    """The model's own shape on the first chip, every operation."""
    shape = aot.SUBSET[0]
    wanted = [aot.Case(operation, *shape, "bf16", False) for operation in aot.OPERATIONS]
    return aot.check([(case, x) for case in wanted for x in aot.record(case, 1)], ["sm_80"], 2)


def kernels() -> dict[str, list[str]]:
    """The kernels that the library has, and those that the gate's cases start."""
    modules = [
        importlib.import_module(f"nsa.ops.triton.{found.name}")
        for found in pkgutil.iter_modules(nsa.ops.triton.__path__)
    ]
    mine = {x.fn.__name__ for m in modules for x in vars(m).values() if is_kernel(x)}
    started = {
        x.kernel.fn.__name__ for c in aot.cases(False, [*aot.OPERATIONS]) for x in aot.record(c)
    }
    return {"library": sorted(mine), "gate": sorted(started)}


def is_kernel(x: object) -> bool:
    """Whether a launcher starts it; what kernels call is named otherwise."""
    return isinstance(x, triton.JITFunction) and x.fn.__name__.endswith("_kernel")


def compiled_anew() -> list[str]:
    """The kernels that another number of packed documents has compiled again."""
    case = aot.Case("nsa_attention", *aot.SUBSET[0], "bf16", True)
    known: set[Variant] = set()
    anew = []
    for documents in (aot.DOCUMENTS, 1, 16, 37):
        with mock.patch.object(aot, "DOCUMENTS", documents):
            variants = {Variant.of(x, "sm_90") for x in aot.record(case, 1)}
        anew += [variant.kernel for variant in variants - known] if known else []
        known |= variants
    return anew


def refusal(**wrong: list[str]) -> str:
    try:
        aot.run(**{"chips": ["sm_80"], **wrong})
    except ValueError as error:
        return str(error)
    return ""


def variant_of_all() -> Variant:
    """What the gate compiles for a launch with tensors on the `meta` device."""
    with recording() as launches:
        arguments = toys.every_kind_of_argument("meta")
        launch(toys.take_all, (1,), arguments, {"WIDTH": 32}, Config(1, 1, 4, 2))
    return Variant.of(launches[0], "sm_80")


def from_the_gate() -> list[str]:
    """What Triton is given for that."""
    source = variant_of_all().source()
    return [repr(x) for x in (source.signature, source.constants, source.attrs)]


class Device:
    """As much of a GPU's driver as Triton asks of it before it compiles."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: triton.backends.compiler.GPUTarget("cuda", 80, 32))


def found_in_the_cache() -> list[bool]:
    """Of what the gate compiled and of something else: whether a launch of it need not compile."""
    compiled.compile_variant(variant_of_all())
    said: list[bool] = []
    triton.knobs.compilation.listener = lambda **facts: said.append(facts["cache_hit"])
    triton.runtime.driver.set_active(Device())
    for width in (32, 16):
        arguments = toys.every_kind_of_argument("cpu")
        toys.take_all.warmup(**arguments, WIDTH=width, num_warps=4, num_stages=2, grid=(1,))
    triton.knobs.compilation.listener = None
    return said


def from_a_launch() -> list[str]:
    """What Triton is about to compile when the kernel is started with real tensors."""
    asked: list[dict[str, Any]] = []

    def instead_of_compiling(*, compile: dict[str, Any], **_: Any) -> bool:
        asked.append(compile)
        return True

    triton.runtime.driver.set_active(Device())
    triton.knobs.runtime.jit_cache_hook = instead_of_compiling
    toys.take_all[(1,)](**toys.every_kind_of_argument("cpu"), WIDTH=32, num_warps=4, num_stages=2)
    triton.knobs.runtime.jit_cache_hook = None
    return [repr(x) for x in (asked[0]["signature"], asked[0]["constants"], *asked[0]["configs"])]


if __name__ == "__main__":
    main()
