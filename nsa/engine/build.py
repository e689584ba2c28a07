"""From a checked configuration to a DeepSpeed engine on every rank."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from nsa.checkpoint.weights import load_weights
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import tolerance
from nsa.engine.gradient_check import check_gradients, inspect_gradients
from nsa.engine.loss_guard import refuse_bad_gradients
from nsa.model import LanguageModel
from nsa.model.sequence_parallel import SequenceParallel

PREFLIGHT_TOKENS = 256  # enough for every branch to see something, cheap on a CPU


def build_model(
    config: RunConfig, device: torch.device, weights: Path | None = None
) -> LanguageModel:
    """The same initial weights on every rank, whatever their number: random, or a checkpoint's."""
    torch.manual_seed(config.train.seed)
    model = LanguageModel(config.model, share_sequences(config.train.sequence_parallel))
    if weights is not None:
        load_weights(model, weights)
    return model.to(device)


def share_sequences(size: int) -> SequenceParallel | None:
    """The ranks that share a sequence with this one: neighbours, `size` of them.

    DeepSpeed is not told. To its ZeRO all ranks are data-parallel, so that each holds a share of
    the optimizer's state and the mean of all gradients is taken; SequenceParallel.mean sees to it
    that this is the gradient of the mean over sequences.
    """
    if size == 1:
        return None
    firsts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(first, first + size))) for first in firsts]
    return SequenceParallel(groups[dist.get_rank() // size])


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and positions, which set scales, don't."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.dim() > 1 and not name.endswith(".position")
            (matrices if decays else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_engine(
    config: RunConfig,
    ds_config: dict[str, Any],
    device: torch.device,
    weights: Path | None = None,
) -> tuple[Any, list[str]]:
    """The engine, and what the gradient check tolerated; a model that cannot train is refused."""
    model = build_model(config, device, weights)
    length = min(config.data.seq_len // config.train.sequence_parallel, PREFLIGHT_TOKENS)
    tokens = torch.randint(config.model.vocab_size, (1, length), device=device)
    notes = check_gradients(inspect_gradients(model, tokens), tolerance(ds_config))
    return initialise(model, config, ds_config), notes


def initialise(model: torch.nn.Module, config: RunConfig, ds_config: dict[str, Any]) -> Any:
    """Hand `model` to DeepSpeed with our parameter groups; returns its engine."""
    if "activation_checkpointing" in ds_config:
        # DeepSpeed reads this block only when it is told to, and from its own config object.
        deepspeed.checkpointing.configure(
            None, deepspeed_config=deepspeed.DeepSpeedConfig(dict(ds_config))
        )
    with contextlib.redirect_stdout(io.StringIO()):  # BF16_Optimizer prints memory figures
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model, config.train.weight_decay),
            config=ds_config,
            dist_init_required=False,
        )
    if isinstance(engine.optimizer, torch.optim.Optimizer):  # stage 0 in fp32 wraps none around it
        refuse_bad_gradients(engine.optimizer)
    return engine
