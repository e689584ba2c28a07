"""Peak memory of `blockwise`, forward and backward, grows no faster than the sequence."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Peaks are relative to that of a first call of this length, which makes all one-time allocations:
# it is long enough for every kind of tile.
FIRST = 300

# VmHWM and not ru_maxrss: a new process starts with the ru_maxrss of the one that spawned it.
MEASURE = """
import sys
import torch
from nsa.ops import NSASpec, nsa_attention

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def inputs(seq_len):
    blocks = spec.compressed_len(seq_len)
    shapes = [(seq_len, 2, 16)] + [(blocks, 1, 16)] * 2 + [(seq_len, 1, 16)] * 4 + [(seq_len, 2, 3)]
    return [torch.full((1, *shape), 0.5, requires_grad=True) for shape in shapes]

def run(tensors):
    nsa_attention(*tensors, spec, backend=sys.argv[1]).sum().backward()

torch.set_num_threads(1)
spec = NSASpec(32, 16, 32, 4, 1, 2, 128)
run(inputs(int(sys.argv[3])))
tensors = inputs(int(sys.argv[2]))
before = peak()
run(tensors)
print(peak() - before)
"""


@cache
def peaks_kb(backend: str, *seq_lens: int) -> list[int]:
    """Peak of one call above its inputs and the first call's peak; a process for each length."""
    # Blocks above 64 KiB go back to the system when they are freed, so peaks are not blurred.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURE, backend, str(seq_len), str(FIRST)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seq_len in seq_lens
    ]
    printed = [process.communicate()[0] for process in running]
    # Codes below zero are signals; -9 is what a machine out of memory sends.
    codes = [process.returncode for process in running]
    assert set(codes) == {0}, f"exit codes {codes}; their stderr stands above"
    return [int(text) for text in printed]


def test_peak_memory_grows_at_most_as_the_sequence_does() -> None:
    """With memory a + b·T, peaks are proportional to T − FIRST: 10.9-fold. With T²: 70-fold."""
    short, long = peaks_kb("blockwise", 1024, 8192)
    assert short > 1_000, "too little to measure"
    assert long <= (8192 - FIRST) / (1024 - FIRST) * short


@pytest.mark.full
def test_the_dense_reference_would_break_that_bound() -> None:
    """From 1k to 4k already: it needs T × T."""
    short, long = peaks_kb("reference", 1024, 4096)
    assert long > 2 * (4096 - FIRST) / (1024 - FIRST) * short


def test_a_long_sequence_needs_a_small_part_of_its_score_matrix() -> None:
    """Two heads' T × T scores at 8k in float32 are half a gigabyte: less than an eighth of that."""
    _, long = peaks_kb("blockwise", 1024, 8192)
    assert long * 1024 < 2 * 8192 * 8192 * 4 / 8
