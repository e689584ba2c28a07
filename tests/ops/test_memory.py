"""Peak memory of `blockwise`, forward and backward, grows no faster than the sequence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Peaks are relative to that of a first call of this length, which makes all one-time allocations:
# it is long enough for every kind of tile.
FIRST = 300

# VmHWM and not ru_maxrss: a new process starts with the ru_maxrss of the one that spawned it.
MEASURE = """
import os
import sys
import torch
import torch._dynamo  # which the first call imports
from nsa.ops import NSASpec, nsa_attention

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def inputs(seq_len):
    blocks = spec.compressed_len(seq_len)
    shapes = [(seq_len, 2, 16)] + [(blocks, 1, 16)] * 2 + [(seq_len, 1, 16)] * 4 + [(seq_len, 2, 3)]
    return [torch.full((1, *shape), 0.5, requires_grad=True) for shape in shapes]

def run(tensors):
    nsa_attention(*tensors, spec, backend="blockwise").sum().backward()

torch.set_num_threads(1)
spec = NSASpec(32, 16, 32, 4, 1, 2, 128)
first, *seq_lens = map(int, sys.argv[1:])
for seq_len in seq_lens:
    if os.fork() == 0:
        run(inputs(first))
        tensors = inputs(seq_len)
        before = peak()
        run(tensors)
        print(peak() - before, flush=True)
        os._exit(0)
    _, code = os.wait()
    assert code == 0, f"{seq_len} tokens: status {code}"
"""


def test_peak_memory_grows_at_most_as_the_sequence_does() -> None:
    """With memory a + b·T, peaks are proportional to T − FIRST: 10.9-fold. With T²: 70-fold.

    Two heads' T × T scores at 8k in float32 are half a gigabyte: less than an eighth of that.
    """
    # Blocks above 64 KiB go back to the system when they are freed, so peaks are not blurred.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURE, *map(str, (FIRST, 1024, 8192))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}; its stderr stands above"
    short, long = map(int, done.stdout.split())  # KB
    assert short > 1_000, "too little to measure"
    assert long <= (8192 - FIRST) / (1024 - FIRST) * short
    assert long * 1024 < 2 * 8192 * 8192 * 4 / 8
