"""What a launch becomes on a chip: compiled without a GPU, and the facts read off the result."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from nsa.bench.hazards import overwritten
from nsa.ops.triton.launch import Launch

TENSOR_CORE = re.compile(
    r"^\s*(?:@\S+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", re.MULTILINE
)
# Any product of the matrix units, by a name that they have all had; waiting for one is none.
MATRIX_UNIT = re.compile(
    r"^\s*(?:@\S+\s+)?[\w.]*mma\.(?!wait_group|commit_group|fence)", re.MULTILINE
)
# Hopper's product with its left operand in registers, where others name shared memory.
FROM_REGISTERS = re.compile(r"\bwgmma\.mma_async\S* \{[^}]*\}, *\{")
MULTIPLY_ADD = re.compile(r"^\s*(?:@\S+\s+)?fma\.[\w.]*?(x2)?\s", re.MULTILINE)
PRODUCT = re.compile(r"\btt\.dot(?:_scaled)?\b")
PRODUCT_SIZES = re.compile(r"\btt\.dot\b.*: tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x")
# A product whose result lies in a blocked layout is done by ordinary multiply-adds.
PLAIN_PRODUCT = re.compile(r"\btt\.dot\b.*-> tensor<[^>]*#blocked")


@dataclass(frozen=True)
class Chip:
    """What a GPU allows: bytes of shared memory a block may take and a multiprocessor has."""

    capability: int
    shared: int
    shared_per_sm: int
    registers_per_sm: int = 65_536
    warps_per_sm: int = 64
    blocks_per_sm: int = 32
    tensor_memory: int = 512  # columns; only sm_100 has any


CHIPS = {
    "sm_80": Chip(80, 163 * 1024, 164 * 1024),
    "sm_90": Chip(90, 227 * 1024, 228 * 1024),
    "sm_100": Chip(100, 227 * 1024, 228 * 1024),
}


@dataclass(frozen=True)
class Variant:
    """One compilation. Equal variants give the same binary; any process can compile one.

    A launch of the same on such a chip finds it in Triton's cache on disk.
    """

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[Any, Any], ...]  # place and value
    attributes: tuple[tuple[Any, tuple[tuple[str, int], ...]], ...]  # place; name and number
    warps: int
    stages: int
    chip: str

    @classmethod
    def of(cls, launch: Launch, chip: str) -> Variant:
        """What Triton is about to compile for this launch on this chip: a launch is asked.

        Its rules differ from version to version, so they are not written down here.
        """
        kernel, config, asked = launch.kernel, launch.config, []

        def instead_of_compiling(*, compile: dict[str, Any], **_: Any) -> bool:
            asked.append(compile)
            return True

        with triton.knobs.runtime.scope():
            triton.knobs.runtime.jit_cache_hook = instead_of_compiling
            driver.set_active(_NoDevice(chip))
            try:
                options = {"num_warps": config.warps, "num_stages": config.stages}
                kernel.warmup(grid=launch.grid, **launch.arguments, **launch.constants, **options)
            finally:
                with suppress(RuntimeError):  # without a GPU there is no driver to go back to
                    driver.reset_active()
        (found,) = asked
        return cls(
            module=kernel.fn.__module__,
            kernel=kernel.fn.__qualname__,
            signature=tuple(found["signature"].items()),
            constants=tuple(found["constants"].items()),
            attributes=tuple(
                (place, tuple((name, number) for name, number in known))
                for place, known in found["configs"][0].items()
            ),
            warps=config.warps,
            stages=config.stages,
            chip=chip,
        )

    def source(self) -> ASTSource:
        """What `triton.compile` takes."""
        fn = getattr(importlib.import_module(self.module), self.kernel)
        attributes = {place: [list(one) for one in known] for place, known in self.attributes}
        return ASTSource(fn, dict(self.signature), dict(self.constants), attributes)


class _NoDevice:
    """As much of a GPU's driver as Triton asks of it before it compiles."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def get_current_device(self) -> str:
        """Kernels keep what they know of a device under this."""
        return self.chip

    def get_current_stream(self, device: str) -> int:
        """Nothing is ever put there."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return _target(self.chip)


@dataclass(frozen=True)
class Facts:
    """Bytes of shared memory a block, registers and spilled bytes a thread, and the like."""

    shared: int
    tensor_memory: int
    registers: int
    spilled: int
    products: int
    plain_products: int
    tensor_core: int
    overwritten: int
    multiplies: bool
    blocks_per_sm: int


def compile_variant(variant: Variant) -> Facts:
    """Compile down to the chip's binary and read it."""
    compiled = _compiled(variant)
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    registers, spilled = _resources(cubin)
    shared = compiled.metadata.shared
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    return Facts(
        shared=shared,
        tensor_memory=tensor_memory,
        registers=registers,
        spilled=spilled,
        products=len(PRODUCT.findall(compiled.asm["ttir"])),
        plain_products=len(PLAIN_PRODUCT.findall(compiled.asm["ttgir"])),
        tensor_core=len(TENSOR_CORE.findall(ptx)),
        overwritten=len(overwritten(disassembled(cubin))) if FROM_REGISTERS.search(ptx) else 0,
        multiplies=_multiplies(compiled.asm["ttir"], ptx, variant.warps),
        blocks_per_sm=_blocks_per_sm(
            CHIPS[variant.chip], shared, tensor_memory, registers, variant.warps
        ),
    )


def _multiplies(ttir: str, ptx: str, warps: int) -> bool:
    """Whether any product is left in the compiled code, by whatever instruction.

    The compiler drops those of a query that sees no key. What is left has an instruction of the
    matrix units, maybe one that TENSOR_CORE does not know, or as many multiply-adds in a thread as
    the smallest product takes.
    """
    if MATRIX_UNIT.search(ptx):
        return True
    least = [
        int(rows) * int(inner) * int(columns) // (32 * warps)
        for rows, inner, columns in PRODUCT_SIZES.findall(ttir)
    ]
    multiply_adds = sum(2 if pair else 1 for pair in MULTIPLY_ADD.findall(ptx))
    return multiply_adds >= min(least, default=0)


def _blocks_per_sm(chip: Chip, shared: int, tensor_memory: int, registers: int, warps: int) -> int:
    """How many blocks fit at once: registers go out by 256 to a warp, and each block's shared
    memory takes 1 KB more for the system."""
    a_warp = -(-registers * 32 // 256) * 256
    return min(
        chip.blocks_per_sm,
        chip.warps_per_sm // warps,
        chip.registers_per_sm // (a_warp * warps),
        chip.shared_per_sm // (shared + 1024),
        chip.tensor_memory // max(tensor_memory, 1),
    )


def binary(variant: Variant) -> bytes:
    """The chip's code."""
    return _compiled(variant).asm["cubin"]


def _compiled(variant: Variant) -> Any:
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    return triton.compile(variant.source(), target=_target(variant.chip), options=options)


def disassembled(cubin: bytes) -> str:
    """The chip's own instructions; takes half a second, however short the code is."""
    return _said_of(cubin, triton.knobs.nvidia.nvdisasm.path, "-c")


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory: Triton's kernels use it for spills alone."""
    usage = _said_of(cubin, triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    functions = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert functions, usage
    return (
        max(int(registers) for registers, _, _ in functions),
        max(int(stack) + int(local) for _, stack, local in functions),
    )


def _said_of(cubin: bytes, *tool: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [*tool, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _target(chip: str) -> GPUTarget:
    return GPUTarget("cuda", CHIPS[chip].capability, 32)
