"""The first steps of a run in which attention is dense, and the switch to sparse attention.

    train.selector_steps   of a converted model: only compressed keys learn
    train.dense_steps      of a new model: all weights learn; at the switch the window's keys become
                           the selected branch's, with their moments

In the dense steps the selected branch attends to all tokens and the others have values of 0, so at
every step the model is an NSA model, and the dense one if it selects all blocks. Nothing but the
step decides the phase, so a run can be resumed in each and at the switch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor

from nsa.engine.config import RunConfig

MOMENTS = "exp_avg", "exp_avg_sq"  # of AdamW


def set_phase(engine: Any, config: RunConfig, step: int) -> bool:
    """Prepare the model for step `step`, counted from 0; return whether only the selector learns.

    At the first step after the dense ones, this is the switch.
    """
    train, model = config.train, engine.module
    if not (train.dense_steps or train.selector_steps):
        return False
    selector_only = train.in_selector_steps(step)
    if 0 < step == train.dense_steps:
        copy_keys_to_window(engine, config)
    model.attend_densely(step < train.dense_steps)
    model.attend_to_all(config.data.seq_len if selector_only else None)
    for group in engine.optimizer.param_groups:  # decay changes weights without a gradient
        group["weight_decay"] = 0.0 if selector_only else group["decay"]
    return selector_only


@torch.no_grad()
def copy_keys_to_window(engine: Any, config: RunConfig) -> None:
    """Copy the selected branch's keys to the window in weights, master weights and Adam's moments.

    Also to the compressed branch, if no selector loss has trained its keys. Muon's momentum is not
    copied: the window's starts at 0.
    """
    copy = partial(copy_selected_rows, compressed=not config.model.attention.selector_loss)
    optimizer = engine.optimizer
    muon = any(group.get("use_muon") for group in optimizer.param_groups)
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links moments to parameters once per process, and loading undoes it.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for layer in engine.module.sparse_layers().values():
        for parameter in layer.k.parameters():
            master = safe_get_full_fp32_param(parameter)
            if master is not None:
                copy(master)
                safe_set_full_fp32_param(parameter, master)
                for name in () if muon and parameter.dim() > 1 else MOMENTS:
                    moment = safe_get_full_optimizer_state(parameter, name)
                    copy(moment)
                    safe_set_full_optimizer_state(parameter, moment, name)
            elif isinstance(optimizer, torch.optim.Optimizer):  # stage 0 in fp32
                for name in MOMENTS:
                    copy(optimizer.state[parameter][name])
            sharded = hasattr(parameter, "ds_id")
            with GatheredParameters([parameter], modifier_rank=0, enabled=sharded):
                copy(parameter.data)


def copy_selected_rows(keys: Tensor, compressed: bool) -> None:
    """Copy the selected branch's rows of [3 · rows, ..] to the window, or also the compressed's."""
    first, selected, window = keys.chunk(3)
    window.copy_(selected)
    if compressed:
        first.copy_(selected)
