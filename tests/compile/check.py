"""Compile check: compile kernel launches for several chips without a GPU, and check limits.

Limits on shared memory, spilled registers and use of tensor cores are checked in each binary, and
that Hopper's asynchronous products are not serialised.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from nsa.ops.triton.configs import AMD
from tests.compile.launches import Case
from tests.kernel_launches import Launch

# Bytes spilled per thread. 24 registers, such as pointers and bounds saved around a loop, cost
# nothing measurable; more means that a part of a tile is spilled: the tile is too large.
MAX_SPILLED = 96
# Of the first candidate, which runs untuned. On an H100 tiles of keys that spill 32 and 40 bytes
# were the fastest (docs/benchmarks/gpu.md); Triton 3.7 makes one of them spill 48.
MAX_SPILLED_FIRST = 48
# float32, for checks only: its products take three passes, so heads above 128 spill with any tile.
MAX_SPILLED_FP32 = 320
MAX_THREADS = 1024  # of a block, on any chip

# PTX: tensor-core instructions, and the asynchronous ones.
TENSOR_CORE = re.compile(
    r"^\s*(?:@\S+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", re.MULTILINE
)
ASYNCHRONOUS = re.compile(r"^\s*(?:@\S+\s+)?(?:wgmma\.mma_async|tcgen05\.mma)", re.MULTILINE)
# ptxas' warnings that it runs wgmma products one after the other: C7510 to C7515.
SERIALISED = re.compile(r"\(C751[0-5]\)")
MATRIX_CORE = re.compile(r"^\s*v_(?:mfma|wmma)_", re.MULTILINE)  # AMD's assembly
# Triton's IR: matrix products, and those without tensor cores (their layout is `#blocked`).
PRODUCT = re.compile(r"\btt\.dot(?:_scaled)?\b")
PLAIN_PRODUCT = re.compile(r"\btt\.dot\b.*-> tensor<[^>]*#blocked")


# Bytes of shared memory that a block may have; 99 KiB: RTX 30, A10 and A6000; RTX 40, L4 and L40S;
# RTX 50.
CHIPS = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
TENSOR_MEMORY = 512  # columns of a block's; only sm_100 has any


@dataclass(frozen=True)
class Variant:
    """One compilation, picklable; variants with the same `repr` give the same binary.

    A later launch on this chip finds the binary in Triton's disk cache.
    """

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[Any, Any]  # position: value
    attributes: dict[Any, Any]  # position: names and numbers
    options: dict[str, int]
    chip: str

    @classmethod
    def of(cls, launch: Launch, chip: str) -> Variant:
        """Return what Triton would compile for this launch on this chip.

        Runs Triton's own launch code up to its compile hook: its rules change between versions.
        """
        fn, config, hooked = launch.kernel.fn, launch.config, []

        def skip_compiling(*, compile: dict[str, Any], **_: Any) -> bool:
            hooked.append(compile)
            return True

        with triton.knobs.runtime.scope():
            triton.knobs.runtime.jit_cache_hook = skip_compiling
            arguments = {**launch.arguments, **launch.constants, **config.options()}
            with as_if_on(chip):
                launch.kernel.warmup(grid=launch.grid, **arguments)
        (spec,) = hooked
        parts = spec["signature"], spec["constants"], spec["configs"][0]
        return cls(fn.__module__, fn.__qualname__, *parts, config.options(), chip)

    def source(self) -> ASTSource:
        """Return the argument of `triton.compile`."""
        fn = getattr(importlib.import_module(self.module), self.kernel)
        return ASTSource(fn, self.signature, self.constants, self.attributes)


@dataclass(frozen=True)
class BinaryStats:
    """Resource usage and instructions of a compiled variant."""

    threads: int  # per block
    shared: int  # bytes per block
    tensor_memory: int  # columns per block
    registers: int  # per thread
    spilled: int  # bytes per thread
    products: int  # matrix products in the source
    plain_products: int  # of these, without tensor cores
    tensor_core: int  # tensor-core instructions
    asynchronous: int = 0  # of these, wgmma and tcgen05, which need tiles of 64 rows or more
    serialised: int = 0  # ptxas' warnings that asynchronous products wait for each other


def compile_variant(variant: Variant) -> BinaryStats:
    """Compile for the chip and read the binary."""
    with as_if_on(variant.chip):
        compiled: Any = triton.compile(
            variant.source(), target=_target(variant.chip), options=variant.options
        )
    asm, metadata = compiled.asm, compiled.metadata
    return BinaryStats(
        **(_read_hsaco(asm) if "hsaco" in asm else _read_cubin(asm, variant.chip)),
        threads=metadata.num_warps * _target(variant.chip).warp_size,
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", None) or 0,
        products=len(PRODUCT.findall(asm["ttir"])),
        plain_products=len(PLAIN_PRODUCT.findall(asm["ttgir"])),
    )


def _read_cubin(asm: dict[str, Any], chip: str) -> dict[str, int]:
    """Read NVIDIA's binary; Triton uses stack and local memory only for spills."""
    ptx = asm["ptx"]
    asynchronous = len(ASYNCHRONOUS.findall(ptx))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
    functions = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert functions, usage
    return {
        "registers": max(int(count) for count, _, _ in functions),
        "spilled": max(int(stack) + int(local) for _, stack, local in functions),
        "tensor_core": len(TENSOR_CORE.findall(ptx)),
        "asynchronous": asynchronous,
        "serialised": serialised(ptx) if asynchronous and chip == "sm_90" else 0,
    }


def serialised(ptx: str) -> int:
    """Count ptxas' warnings, which Triton does not show: assemble once more."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = triton.knobs.nvidia.ptxas.path
        return len(SERIALISED.findall(_output(ptxas, "-arch=sm_90a", "-o", "/dev/null", file.name)))


def _read_hsaco(asm: dict[str, Any]) -> dict[str, int]:
    """Read AMD's assembly, which states what the binary uses; scratch memory holds spills alone."""
    text = asm["amdgcn"]
    registers, spilled = (
        max(map(int, re.findall(rf"^\s*\.{name}:\s*(\d+)", text, re.MULTILINE)))
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    products = len(MATRIX_CORE.findall(text))
    return {"registers": registers, "spilled": spilled, "tensor_core": products}


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


@contextmanager
def as_if_on(chip: str) -> Iterator[None]:
    """Give Triton the part of this chip's driver that it uses until a kernel is compiled."""
    no_device = SimpleNamespace(
        get_current_device=lambda: chip,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: _target(chip),
    )
    driver.set_active(no_device)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # without a GPU there is no driver to restore
            driver.reset_active()


def _target(chip: str) -> GPUTarget:
    if chip in AMD:
        return GPUTarget("hip", chip, 64)
    return GPUTarget("cuda", int(chip.removeprefix("sm_")), 32)


def check(
    launches: Iterable[tuple[Case, Launch, str]], jobs: int = 1, max_spilled: int = MAX_SPILLED
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compile each distinct launch for its chip, print a line of each; return rows and failures."""
    assert not triton.knobs.runtime.interpret, "interpreted kernels cannot be compiled"
    distinct: dict[str, tuple[Variant, Case, Launch]] = {}
    for case, launch, chip in launches:
        variant = Variant.of(launch, chip)
        distinct.setdefault(repr(variant), (variant, case, launch))
    rows, failures = [], []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        over: Callable[..., Iterable[Any]] = map if jobs == 1 else pool.map
        variants = [variant for variant, _, _ in distinct.values()]
        compiled = zip(distinct.values(), over(_try_compile, variants), strict=True)
        for (variant, case, launch), stats in compiled:
            config = str(launch.config)
            name = f"{variant.kernel} {case} {config} {variant.chip}"
            if isinstance(stats, str):
                errors, figures = [f"does not compile: {stats}"], {}
            else:
                errors, figures = _exceeded(stats, variant.chip, case, max_spilled), asdict(stats)
            words = [f"{what} {figure}" for what, figure in figures.items()]
            print(f"{name}:", ", ".join([*words, *errors]), flush=True)
            failures += [f"{name}: {x}" for x in errors]
            names = {"kernel": variant.kernel, "chip": variant.chip, "config": config}
            call = asdict(case) | {"spec": case.pattern}
            rows.append({**names, **call, **figures, "failures": errors})
    print(f"{len(rows)} compiled, {len(failures)} failures", *failures, sep="\n")
    return rows, failures


def _exceeded(stats: BinaryStats, chip: str, case: Case, max_spilled: int) -> list[str]:
    if case.dtype == "fp32" and max(case.key, case.value) > 128:
        max_spilled = MAX_SPILLED_FP32
    errors = [
        f"{figure:,} {what}, limit {limit:,}"
        for what, figure, limit in (
            ("threads a block", stats.threads, MAX_THREADS),
            ("bytes of shared memory a block", stats.shared, CHIPS[chip]),
            ("columns of tensor memory a block", stats.tensor_memory, TENSOR_MEMORY),
            ("bytes spilled a thread", stats.spilled, max_spilled),
            ("matrix products without tensor cores", stats.plain_products, 0),
            ("warnings of serialised products", stats.serialised, 0),
        )
        if figure > limit
    ]
    # A single position sees no compressed block: the compiler drops its products.
    if stats.products and not stats.tensor_core and case.seq_len > 1:
        errors.append("matrix products, and no tensor-core instruction")
    return errors


def _try_compile(variant: Variant) -> BinaryStats | str:
    try:
        return compile_variant(variant)
    except Exception as error:  # any compiler error is this variant's failure
        return " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())
