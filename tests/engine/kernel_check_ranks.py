"""Runs on two ranks, in Triton's interpreter: on rank 1 a kernel is wrong. Each prints results."""

import os
import sys

if "TRITON_INTERPRET" not in os.environ:  # read when triton is first imported
    os.execve(sys.executable, [sys.executable, __file__], {**os.environ, "TRITON_INTERPRET": "1"})

import torch
import torch.distributed as dist

from nsa.engine.checks import fall_back
from nsa.engine.process_group import CpuCollectives, stop_ranks
from nsa.model import AttentionConfig, ModelConfig, kernel_check
from nsa.ops.backend import dispatch
from nsa.ops.triton import per_token

dist.init_process_group("gloo")
collectives = CpuCollectives(max_seconds=60)
if dist.get_rank() == 1:
    right = per_token.triton_swiglu
    per_token.triton_swiglu = lambda *args: right(*args) * 1.05
shape = {"vocab_size": 61, "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}
config = ModelConfig(**shape, mlp_width=16, attention=AttentionConfig(kind="dense"))
kernel_check.ROWS = 6  # few, and two operations only: the interpreter is slow
checked = kernel_check.operations(config, torch.device("cpu"), packed=False)
two = [x for x in checked if x.name in ("swiglu", "add_rms_norm")]
kernel_check.operations = lambda *_: two
checks = kernel_check.check_kernels(config, torch.bfloat16, torch.device("cpu"), packed=False)
results = collectives.gather(checks, list[kernel_check.KernelResult])
try:
    fall_back(results, "triton")
except ValueError as error:
    print("refused:", error)
check = fall_back(results, "auto")
print(f"{check.status}: {check.detail}")
on_gpu = torch.empty(2, 3, 8, 4, device="meta")  # counts as a GPU
backends = (dispatch("auto", name, on_gpu).__name__ for name in ("swiglu", "add_rms_norm"))
print("backends:", *(name.rpartition(".")[2] for name in backends))
stop_ranks()
