"""Runs on two ranks: each cell of ZeRO x checkpointing x accumulation x dtype against one process.

The optimizer is SGD with momentum and no clipping: parameters move in proportion to the gradients,
so a lost micro-batch or a wrong scale shows, which Adam would normalize away.
"""

import copy
import json
import sys
from functools import cache

import deepspeed
import torch
import torch.distributed as dist

from nsa.dtypes import DTYPES
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import LanguageModel
from tests.engine.small import small

STEPS, SEQ_LEN = 2, 48  # momentum acts from the second step on
LEARNING_RATE, MOMENTUM = 0.1, 0.9
ZERO = {
    "0": ({"stage": 0}, None),
    "1": ({"stage": 1, "overlap_comm": False}, None),
    "1-fp32acc": ({"stage": 1}, "fp32"),
    "1-overlap": ({"stage": 1, "overlap_comm": True}, None),
    "2": ({"stage": 2, "overlap_comm": False}, None),
    "2-overlap": ({"stage": 2, "overlap_comm": True}, None),
    "3": ({"stage": 3, "stage3_param_persistence_threshold": 0}, None),
}


def build(checkpointing: str) -> LanguageModel:
    """`shared <mode>`: both layers are one block, whose parameters are used twice."""
    torch.manual_seed(7)
    config = small(checkpointing.removeprefix("shared "))
    config.model.attention.compressor = "mlp"
    model = LanguageModel(config.model)
    model.initialize(0.3)  # so that every tensor, φ's too, has a gradient to compare
    if checkpointing.startswith("shared "):
        model.blocks[1] = model.blocks[0]
    return model


def tokens(step: int, micro_step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + 10 * micro_step + rank)
    return torch.randint(256, (1, SEQ_LEN), generator=generator)


@cache
def single_process(
    checkpointing: str, accumulation: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The same steps in plain PyTorch: weights and sums in fp32, the model in `dtype`."""
    master = build(checkpointing)
    optimizer = torch.optim.SGD(master.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    scale = 1 / (accumulation * dist.get_world_size())
    for step in range(STEPS):
        worker = copy.deepcopy(master).to(dtype)
        optimizer.zero_grad()
        for micro_step in range(accumulation):
            for rank in range(dist.get_world_size()):
                ids = tokens(step, micro_step, rank)
                gradients = torch.autograd.grad(worker(ids, labels=ids), list(worker.parameters()))
                for parameter, gradient in zip(master.parameters(), gradients, strict=True):
                    scaled = gradient.float() * scale
                    parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        optimizer.step()
    return {name: p.detach().to(dtype).float() for name, p in master.named_parameters()}


def with_deepspeed(
    zero: str, checkpointing: str, accumulation: int, precision: str
) -> dict[str, torch.Tensor]:
    section, accumulation_dtype = ZERO[zero]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE, "momentum": MOMENTUM}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**section, "reduce_bucket_size": 3_000},
        "bf16": {"enabled": precision == "bf16"},
    }
    if accumulation_dtype:
        config["data_types"] = {"grad_accum_dtype": accumulation_dtype}
    model = build(checkpointing)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    for step in range(STEPS):
        for micro_step in range(accumulation):
            ids = tokens(step, micro_step, dist.get_rank())
            engine.backward(engine(ids, labels=ids))
            engine.step()
    parameters = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=zero == "3"):
            parameters[name] = parameter.detach().float().clone()
    engine.destroy()
    return parameters


def worst_error(
    parameters: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    initial: LanguageModel,
    eps: float,
) -> float:
    """Return the largest error of a tensor, in multiples of what rounding to the dtype costs.

    A weight of size |p| is stored to eps/2·|p|, and a sum of a few gradients that were each rounded
    once or twice changes its update by a few eps of the update's size.
    """
    start = dict(initial.named_parameters())
    errors = []
    for name, value in expected.items():
        update = (value - start[name].detach()).norm()
        assert update > 0, f"{name} did not change"
        errors.append((parameters[name] - value).norm() / (eps * (value.norm() + 4 * update)))
    return float(max(errors))


def main() -> None:
    cells = json.loads(sys.argv[1])
    start_ranks(Ranks.from_environment())
    for zero, checkpointing, accumulation, precision in cells:
        dtype = DTYPES[precision]
        plain = "shared none" if checkpointing.startswith("shared ") else "none"
        parameters = with_deepspeed(zero, checkpointing, accumulation, precision)
        error, wrong = (
            worst_error(
                parameters,
                single_process(plain, micro_batches, dtype),
                build(plain),
                torch.finfo(dtype).eps,
            )
            for micro_batches in (accumulation, 3 - accumulation)
        )
        # `wrong`: against a reference with one micro-batch more or less.
        cell = [zero, checkpointing, accumulation, precision]
        print(json.dumps({"cell": cell, "error": error, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
    stop_ranks()
