"""Load checkpoint files as data: refuse pickles that would run code, also inside DeepSpeed.

DeepSpeed calls torch.load(weights_only=False), which calls any function that a pickle names. Inside
`data_only`, PyTorch's restricted unpickler reads instead: tensors, plain types, and the classes of
DeepSpeed's optimizer that only hold values.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def data_only(checkpoint: Path, *, optimizer: bool = True) -> Iterator[None]:
    """Make every torch.load of the block restricted; raise a ValueError if a file needs more.

    `optimizer`: allow the classes in DeepSpeed's optimizer files; imports DeepSpeed, which is slow.
    """
    classes: list[Any] = []
    if optimizer:  # these classes only hold values
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes = [fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum]
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"  # torch.load reads it at each call
    try:
        with torch.serialization.safe_globals(classes):
            yield
    except (pickle.UnpicklingError, EOFError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise ValueError(f"{checkpoint}: a file is damaged; use another checkpoint") from error
        raise ValueError(
            f"{checkpoint}: a file holds {named[1]}, which could run code, and was not loaded; "
            "use a checkpoint that this project wrote"
        ) from None
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})
