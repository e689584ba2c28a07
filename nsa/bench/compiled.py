"""A launch compiled for a chip without a GPU, and the facts read from its binary."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from nsa.bench.hazards import overwritten
from nsa.ops.triton.launch import Launch

# In PTX: instructions of the tensor cores; Hopper's product with its left operand in registers.
TENSOR_CORE = re.compile(
    r"^\s*(?:@\S+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", re.MULTILINE
)
ASYNCHRONOUS = re.compile(r"^\s*(?:@\S+\s+)?(?:wgmma\.mma_async|tcgen05\.mma)", re.MULTILINE)
FROM_REGISTERS = re.compile(r"\bwgmma\.mma_async\S* \{[^}]*\}, *\{")
# In Triton's IR: products, and those with a blocked layout, done by multiply-adds.
PRODUCT = re.compile(r"\btt\.dot(?:_scaled)?\b")
PLAIN_PRODUCT = re.compile(r"\btt\.dot\b.*-> tensor<[^>]*#blocked")


@dataclass(frozen=True)
class ChipLimits:
    """A GPU's limits; bytes of shared memory per block and per multiprocessor."""

    capability: int
    shared: int
    shared_per_sm: int
    registers_per_sm: int = 65_536
    warps_per_sm: int = 64
    blocks_per_sm: int = 32
    tensor_memory: int = 512  # columns; only sm_100 has any


CHIPS = {
    "sm_80": ChipLimits(80, 163 * 1024, 164 * 1024),
    "sm_90": ChipLimits(90, 227 * 1024, 228 * 1024),
    "sm_100": ChipLimits(100, 227 * 1024, 228 * 1024),
}


@dataclass(frozen=True)
class Variant:
    """One compilation, picklable; variants with the same `repr` give the same binary.

    A launch on such a chip finds the binary in Triton's disk cache.
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
        """What Triton would compile for this launch on this chip.

        Triton's own launch code decides, up to its compile hook: the rules change with its version.
        """
        fn, config, hooked = launch.kernel.fn, launch.config, []

        def skip_compiling(*, compile: dict[str, Any], **_: Any) -> bool:
            hooked.append(compile)
            return True

        with triton.knobs.runtime.scope():
            triton.knobs.runtime.jit_cache_hook = skip_compiling
            # The part of a GPU driver that Triton uses before it compiles.
            no_device = SimpleNamespace(
                get_current_device=lambda: chip,
                get_current_stream=lambda device: 0,
                get_current_target=lambda: _target(chip),
            )
            driver.set_active(no_device)
            try:
                arguments = {**launch.arguments, **launch.constants, **config.options()}
                launch.kernel.warmup(grid=launch.grid, **arguments)
            finally:
                with suppress(RuntimeError):  # without a GPU there is no driver to restore
                    driver.reset_active()
        (spec,) = hooked
        parts = spec["signature"], spec["constants"], spec["configs"][0]
        return cls(fn.__module__, fn.__qualname__, *parts, config.options(), chip)

    def source(self) -> ASTSource:
        """The argument of `triton.compile`."""
        fn = getattr(importlib.import_module(self.module), self.kernel)
        return ASTSource(fn, self.signature, self.constants, self.attributes)


@dataclass(frozen=True)
class Facts:
    """Figures of a compiled variant."""

    shared: int  # bytes per block
    tensor_memory: int  # columns per block
    registers: int  # per thread
    spilled: int  # bytes per thread
    products: int  # in the source
    plain_products: int  # without tensor cores
    tensor_core: int  # instructions
    asynchronous: int  # of them; wgmma and tcgen05, which take tiles of 64 rows or more
    overwritten: int  # products whose operand is overwritten while they run
    blocks_per_sm: int


def compile_variant(variant: Variant) -> Facts:
    """Compile to the chip's binary and read it."""
    options, target = variant.options, _target(variant.chip)
    compiled: Any = triton.compile(variant.source(), target=target, options=options)
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    registers, spilled = _resources(cubin)
    shared = compiled.metadata.shared
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    hazards = 0
    if FROM_REGISTERS.search(ptx):
        hazards = len(overwritten(_tool_output(cubin, triton.knobs.nvidia.nvdisasm.path, "-c")))
    return Facts(
        shared=shared,
        tensor_memory=tensor_memory,
        registers=registers,
        spilled=spilled,
        products=len(PRODUCT.findall(compiled.asm["ttir"])),
        plain_products=len(PLAIN_PRODUCT.findall(compiled.asm["ttgir"])),
        tensor_core=len(TENSOR_CORE.findall(ptx)),
        asynchronous=len(ASYNCHRONOUS.findall(ptx)),
        overwritten=hazards,
        blocks_per_sm=_blocks_per_sm(
            CHIPS[variant.chip], shared, tensor_memory, registers, options["num_warps"]
        ),
    )


def _blocks_per_sm(
    chip: ChipLimits, shared: int, tensor_memory: int, registers: int, warps: int
) -> int:
    """Concurrent blocks: registers are allocated by 256 per warp, and the system takes 1 KB of
    shared memory per block."""
    per_warp = -(-registers * 32 // 256) * 256
    return min(
        chip.blocks_per_sm,
        chip.warps_per_sm // warps,
        chip.registers_per_sm // (per_warp * warps),
        chip.shared_per_sm // (shared + 1024),
        chip.tensor_memory // max(tensor_memory, 1),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, which Triton uses for spills alone."""
    usage = _tool_output(cubin, triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    functions = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert functions, usage
    return (
        max(int(registers) for registers, _, _ in functions),
        max(int(stack) + int(local) for _, stack, local in functions),
    )


def _tool_output(cubin: bytes, *tool: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [*tool, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _target(chip: str) -> GPUTarget:
    return GPUTarget("cuda", CHIPS[chip].capability, 32)
