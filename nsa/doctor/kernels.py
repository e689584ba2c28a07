"""M7C's kernels on this GPU, beside PyTorch: `nsa doctor --kernels`.

`python -m nsa.doctor.kernels` does the same where only torch and triton are installed.
"""

from __future__ import annotations

import sys

import torch

from nsa.doctor.check import OK, SKIP, WARN, Check, lines
from nsa.model import AttentionConfig, ModelConfig
from nsa.model.kernel_check import check_kernels, table


def kernel_checks() -> tuple[Check, list[str]]:
    """Check the kernels of M7C with each φ of its recipes; return the result and a table."""
    if not torch.cuda.is_available():
        return Check("kernels", SKIP, "no GPU here"), []
    device = torch.device("cuda", torch.cuda.current_device())
    config = ModelConfig(attention=AttentionConfig(compressor="pool", selector_loss=1.0))
    mean = ModelConfig(attention=AttentionConfig())
    results = [
        result
        for model, packed in ((config, False), (config, True), (mean, False))
        for result in check_kernels(model, torch.bfloat16, device, packed)
    ]
    wrong = [f"{result.operation}: {result.problem}" for result in results if result.problem]
    if wrong:
        fix = "set model.attention.backend=auto: these operations then run in PyTorch"
        return Check("kernels", WARN, "; ".join(wrong), fix), table(results)
    return Check("kernels", OK, f"{len(results)} cases equal PyTorch's"), table(results)


if __name__ == "__main__":
    check, rows = kernel_checks()
    print(*rows, *lines([check]), sep="\n")
    sys.exit(check.status == WARN)
