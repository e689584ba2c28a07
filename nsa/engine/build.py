"""Build the model and DeepSpeed's engine: parameter groups, gradient check, initialisation."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_set_full_fp32_param

from nsa.checkpoint.weights import read_weights, set_weights
from nsa.engine.checks import check_gradients
from nsa.engine.config import RunConfig
from nsa.engine.loss_guard import skip_nonfinite_steps
from nsa.model import LanguageModel

CHECK_TOKENS = 256  # of the gradient check: enough for every branch, cheap on a CPU


def build_model(
    config: RunConfig, device: torch.device, weights: Path | None = None
) -> LanguageModel:
    """Build the model with the same weights on every rank: random, or read from `weights`."""
    torch.manual_seed(config.train.seed)
    model = LanguageModel(config.model)
    if weights is not None:
        set_weights(model, read_weights(weights), weights)
    return model.to(device)


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, value_rate: float = 1.0
) -> list[dict[str, Any]]:
    """Return a group with weight decay, and one without: norms and position embeddings.

    If values learn at a rate of their own, their projections are a third group.
    """
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    values: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if value_rate != 1.0 and name.endswith("attention.v.weight"):
            values.append(parameter)
        elif parameter.dim() > 1 and not name.endswith(".position"):
            decayed.append(parameter)
        else:
            others.append(parameter)
    groups = [  # the loop sets weight_decay, and multiplies the rate by lr_factor
        {"params": decayed, "weight_decay": weight_decay, "decay": weight_decay},
        {"params": others, "weight_decay": 0.0, "decay": 0.0},
    ]
    if values:
        groups.append({**groups[0], "params": values, "lr_factor": value_rate})
    return groups


def gradient_check_tokens(config: RunConfig) -> int:
    """Return how many tokens the gradient check reads on each rank."""
    return min(config.data.seq_len, CHECK_TOKENS)


def build_engine(
    config: RunConfig, ds_config: dict[str, Any], device: torch.device, weights: Path | None = None
) -> Any:
    """Return DeepSpeed's engine; raise ValueError if the gradient check fails."""
    model = build_model(config, device, weights)
    shape = 1, gradient_check_tokens(config)
    check_gradients(model, torch.randint(config.model.vocab_size, shape, device=device))
    engine = initialise(model, config, ds_config)
    if weights is not None:
        # DeepSpeed's master weights start as copies of weights rounded to the run's dtype. Selector
        # steps train only the index: the other weights of an fp32 checkpoint must stay as they are.
        stored = read_weights(weights)
        for name, parameter in engine.module.named_parameters():
            if stored[name].dtype != parameter.dtype:
                safe_set_full_fp32_param(parameter, stored[name].to(parameter.device).float())
    return engine


def initialise(model: torch.nn.Module, config: RunConfig, ds_config: dict[str, Any]) -> Any:
    """Call deepspeed.initialize with our parameter groups; return the engine."""
    if "activation_checkpointing" in ds_config:
        # DeepSpeed reads this section here only, not in initialize().
        deepspeed.checkpointing.configure(None, deepspeed_config=dict(ds_config))
    groups = parameter_groups(model, config.train.weight_decay, config.train.value_rate)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # BF16_Optimizer prints memory figures
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=groups, config=ds_config, dist_init_required=False
            )
    except Exception as error:
        if isinstance(error, ImportError) and error.name == "wandb":
            fix = "; install it, or remove its block from the DeepSpeed config"
        elif type(error).__module__.partition(".")[0] == "wandb":
            fix = ""  # wandb's errors say what to do: without an API key, log in
        else:
            raise
        raise ValueError(f"wandb: {' '.join(str(error).split())}{fix}") from error
    if isinstance(engine.optimizer, torch.optim.Optimizer):  # plain: stage 0 with fp32
        skip_nonfinite_steps(engine.optimizer)
    return engine
