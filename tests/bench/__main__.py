"""`python -m tests.bench <benchmark>`: what this repository decides by measuring; needs a clone.

The harness is that of `python -m nsa.bench`. `python -m tests.bench.host_time` stands alone.
"""

from __future__ import annotations

from functools import partial

from nsa.bench.__main__ import main as run_benchmark
from nsa.bench.__main__ import run_script

BENCHMARKS = {  # name: one line of help
    "comm": "what each DeepSpeed config sends, and what that costs a step",
    "costs": "on a CPU: attention and a layer, data, recording of layer health",
    "text": "loss on far text: NSA, its parts and dense attention, several seeds",
}
main = partial(run_benchmark, package="tests.bench", benchmarks=BENCHMARKS)

if __name__ == "__main__":
    run_script(main)
