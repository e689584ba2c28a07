"""Runs on two ranks: ReductionCheck on sound engines, and on ones that reduce a bucket wrongly.

A bug changes what DeepSpeed's own reduction receives; the gradients of the backward pass stay as
they are. The argument lists cells, each with names of bugs; with the path of a recipe and its
flags in its place, runs that with a dropped bucket.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from nsa.engine.cpu_collectives import RunAborted
from nsa.engine.gradient_check import ReductionCheck
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from tests.engine.matrix_ranks import ZERO, build, tokens

BUCKET = 6_000  # elements: four or more for the model, as 2**25 are for M7C
BUGS: dict[str, Callable[[int], float]] = {  # factor of a bucket's gradients, by rank
    "dropped": lambda rank: 0.0,
    "scaled": lambda rank: 1.1,
    "rank 0 alone": lambda rank: 2.0 if rank == 0 else 0.0,
}


@contextmanager
def planted(bug: str | None, zero: str, bucket: int) -> Any:
    """Change one bucket of DeepSpeed's reduction: the first is number 0."""
    if bug is None:
        yield
        return
    kind, name = {
        "0": (DeepSpeedEngine, "allreduce_bucket"),
        "3": (DeepSpeedZeroOptimizer_Stage3, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"),
        "1-fp32acc": (DeepSpeedEngine, "allreduce_bucket"),  # by BF16_Optimizer
    }.get(zero, (DeepSpeedZeroOptimizer, "average_tensor"))
    reduce = getattr(kind, name)
    left = [bucket]  # before the wrong one

    def wrong(self: Any, gradients: Any, *arguments: Any) -> Any:
        if left[0] == 0:
            for gradient in [gradients] if isinstance(gradients, torch.Tensor) else gradients:
                tensor = gradient.grad if zero == "3" else gradient
                tensor.mul_(BUGS[bug](dist.get_rank()))
        left[0] -= 1
        return reduce(self, gradients, *arguments)

    with mock.patch.object(kind, name, wrong):
        yield


def train(
    zero: str, checkpointing: str, accumulation: int, precision: str, checked: bool
) -> tuple[str | None, float, list[torch.Tensor]]:
    """Run two steps; return the refusal, the seconds of the check, and the parameters."""
    section, accumulation_dtype = ZERO[zero]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**section, "reduce_bucket_size": BUCKET},
        "bf16": {"enabled": precision == "bf16"},
    }
    if accumulation_dtype:
        config["data_types"] = {"grad_accum_dtype": accumulation_dtype}
    model = build(checkpointing)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    check = ReductionCheck(engine) if checked else None
    seconds = 0.0
    try:
        for micro_step in range(2 * accumulation):
            ids = tokens(0, micro_step, dist.get_rank())
            engine.backward(engine(ids, labels=ids))
            if check is not None:
                start = time.perf_counter()
                check.compare()
                seconds += time.perf_counter() - start
            engine.step()
    except RunAborted as error:
        return str(error), seconds, []
    finally:
        engine.destroy()
    parameters = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=zero == "3"):
            parameters.append(parameter.detach().clone())
    return None, seconds, parameters


def main() -> None:
    start_ranks(Ranks.from_environment())
    for cell, bugs in json.loads(sys.argv[1]):
        refusals = {}
        for bug in (None, *bugs):
            with planted(bug, cell[0], bucket=0 if cell[0] in ("0", "1-fp32acc") else 1):
                refusal, taken, parameters = train(*cell, checked=True)
            if bug is None:
                assert refusal is None, refusal
                seconds = taken
                _, _, unchecked = train(*cell, checked=False)
                same = all(map(torch.equal, parameters, unchecked))
            else:
                refusals[bug] = refusal
        row = {"cell": cell, "same": same, "seconds": seconds, "refusals": refusals}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1].endswith(".py"):
        del sys.argv[0]
        with planted("dropped", "2", bucket=0):
            runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        main()
        stop_ranks()
