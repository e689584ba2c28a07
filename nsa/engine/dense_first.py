"""The first steps of a run, in which attention is dense.

    train.selector_steps   of a converted model: only compressed keys learn
    train.dense_steps      of a new model: all weights learn

In the dense steps the selected branch attends to all tokens, and the values of the others are 0. So
each checkpoint is an NSA model, which equals the dense one if it selects all blocks, and the switch
changes no weight. Nothing but the step decides the phase, so a run can be resumed in either.
"""

from __future__ import annotations

from typing import Any

from nsa.engine.config import RunConfig


def set_phase(engine: Any, config: RunConfig, step: int) -> bool:
    """Prepare step `step`, counted from 0; return whether only the selector learns in it."""
    train, model = config.train, engine.module
    if not (train.switch_step or train.selector_steps):
        return False
    selector_only = train.in_selector_steps(step)
    model.attend_densely(step < train.switch_step)
    model.attend_to_all(config.data.seq_len if selector_only else None)
    for group in engine.optimizer.param_groups:  # decay changes weights without a gradient
        group["weight_decay"] = 0.0 if selector_only else group["decay"]
    return selector_only
