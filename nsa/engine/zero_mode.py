"""ZeroMode: the settings of a resolved DeepSpeed config that determine its optimizer class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.config import DtypeEnum

from nsa.dtypes import DTYPES

PRECISION_OF_DTYPE = {str(dtype): precision for precision, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ZeroMode:
    """What determines DeepSpeed's optimizer class, and so which keys it reads."""

    stage: int
    precision: str  # "bf16", "fp16" or "fp32"
    accumulation: str  # dtype of accumulated gradients
    overlap: bool  # reduction during the backward pass
    offload: bool  # of optimizer or parameters, to the CPU or NVMe
    muon: bool  # for matrices, instead of AdamW

    @property
    def bf16_optimizer(self) -> bool:
        """Whether BF16_Optimizer runs: stage 1, bf16 weights, fp32 accumulation."""
        mode = (self.stage, self.precision, self.accumulation)
        return mode == (1, "bf16", "fp32") and not self.offload

    @property
    def buckets(self) -> bool:
        """Whether gradients are reduced in buckets of `reduce_bucket_size` elements."""
        return self.stage > 0 and not self.bf16_optimizer


def zero_mode(resolved: Mapping[str, Any]) -> ZeroMode:
    """Return the ZeroMode of a config whose stage and precision are filled in."""
    zero = resolved["zero_optimization"]
    precision = next((p for p in ("bf16", "fp16") if resolved[p]["enabled"]), "fp32")
    accumulation = block_of(resolved, "data_types").get("grad_accum_dtype") or precision
    try:
        accumulation = PRECISION_OF_DTYPE[str(DtypeEnum(accumulation).value)]
    except (KeyError, ValueError):
        accumulation = str(accumulation)
    offloads = [block_of(zero, name) for name in ("offload_optimizer", "offload_param")]
    overlap = zero.get("overlap_comm")
    return ZeroMode(
        stage=zero["stage"],
        precision=precision,
        accumulation=accumulation,
        overlap=zero["stage"] == 3 if overlap is None else bool(overlap),
        offload=any(block.get("device", "none") != "none" for block in offloads),
        muon=has_muon(resolved),
    )


def has_muon(ds_config: Mapping[str, Any]) -> bool:
    """Return whether Muon updates the matrices, instead of AdamW."""
    return str(block_of(ds_config, "optimizer").get("type")).lower() == "muon"


def block_of(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a block; an empty one if it is missing or no block."""
    block = tree.get(name)
    return block if isinstance(block, dict) else {}
