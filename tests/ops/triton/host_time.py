"""`python -m tests.ops.triton.host_time [STEPS]`: the CPU's work for a layer's attention on a GPU.

The gated op of a few layers, forward and backward: dispatch, autograd, launchers, small PyTorch
operations and Triton's launch code, with M7C's heads. Kernels are not compiled, and nothing starts
on a GPU: the driver's part of a launch is missing, and PyTorch's operations run on the CPU, on few
tokens. Prints JSON, by layer: the median and tenth percentile of a step in us of process time, its
launches, and the number of Python functions that it calls, which no other load changes.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from nsa.ops.triton.band import triton_gated
from nsa.spec import NSASpec

TOKENS, LAYERS, WARM_UP = 64, 4, 20
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
SPEC = NSASpec()


class Device:
    """The part of a GPU driver that Triton's launch code uses."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


class Binary:
    """Stands in for a compiled kernel; counts its launches."""

    function = packed_metadata = None
    launches = 0

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        Binary.launches += 1

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """As triton.compiler.CompiledKernel launches."""

        def start(*arguments: Any) -> None:
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            metadata = self.launch_metadata(grid, stream, *arguments)
            self.run(*grid, stream, self.function, self.packed_metadata, metadata, None, None,
                     *arguments)  # fmt: skip

        return start


def without_compiling(kernel: JITFunction, key: str, signature: Any, device: int, *_: Any) -> Any:
    """`JITFunction._do_compile`, which puts the binary where it is found the next time."""
    return kernel.device_caches[device][0].setdefault(key, Binary())


def main() -> None:
    """Print the figures of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    JITFunction._do_compile = without_compiling
    driver.set_active(Device())
    blocks = SPEC.compressed_len(TOKENS)
    q, do = (torch.randn(1, TOKENS, 12, 64, dtype=torch.bfloat16) for _ in range(2))
    pairs = [q.new_ones(1, n, 2, 64) for n in (blocks, blocks, *[TOKENS] * 4)]
    tensors = [x.requires_grad_() for x in (q, *pairs, q.new_ones(1, TOKENS, 12, 3))]

    def step() -> None:
        x = q
        for _ in range(LAYERS):
            x = triton_gated(x, *tensors[1:], None, SPEC.to_ints(), 0.125)[0]
        torch.autograd.grad(x, tensors, do)

    for _ in range(WARM_UP):
        step()
    before = Binary.launches
    calls = python_calls(step) / LAYERS
    launches = (Binary.launches - before) / LAYERS
    gc.disable()
    times = sorted(microseconds(step) for _ in range(STEPS))
    figures = {"median_us": statistics.median(times), "p10_us": times[STEPS // 10]}
    print(json.dumps({**figures, "launches": launches, "python_calls": calls}))


def microseconds(step: Any) -> float:
    start = time.process_time_ns()
    step()
    return (time.process_time_ns() - start) / 1e3 / LAYERS


def python_calls(step: Any) -> int:
    """Calls of Python functions in one step."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    return count


if __name__ == "__main__":
    main()
