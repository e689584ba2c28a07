"""Save and restore the random number generators of one rank: torch, CUDA, NumPy, Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Return the state of this rank's generators in types that torch.load reads safely."""
    numpy: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(path: Path) -> None:
    state = torch.load(path, map_location="cpu", weights_only=True)
    kind, keys, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
