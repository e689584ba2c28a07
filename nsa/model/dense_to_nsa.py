"""Dense-to-NSA weight conversion: NSA training starts near the dense model's outputs.

    gate weights 0, gates ½:          o = ½ (o_cmp + o_sel + o_win)
    K_b = K and V_b = 2 s_b V:        o = s_cmp · A_cmp V + s_sel · A_sel V + s_win · A_win V

With s_sel = 1 and the others 0, the result equals the dense model on texts of up to select_top ·
select_len tokens, and approximates it on longer ones. The other branches add nothing to the output
at first, but the compressed keys (means of the dense model's) select the blocks, and all values get
a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.model.compressor import BlockPool
from nsa.model.config import AttentionConfig, ModelConfig

Weights = dict[str, Tensor]


def default_shares(attention: AttentionConfig) -> dict[str, float]:
    """Return each branch's share s of the dense output; they sum to 1.

    The selected branch carries all of it, since only it reaches far tokens; without it the window.
    """
    names = attention.branch_names
    first = next(name for name in ("sel", "win", "cmp") if name in names)
    return {name: float(name == first) for name in names}


def dense_to_nsa(
    weights: Weights, config: ModelConfig, shares: dict[str, float] | None = None
) -> Weights:
    """Convert a dense model's weights to those of `config`, which differs in its attention only."""
    attention = config.attention
    if attention.compressor == "mlp":
        raise ValueError(
            "model.attention.compressor = 'mlp': cannot start as the mean of a dense model's keys; "
            "set it to pool or mean"
        )
    shares = default_shares(attention) if shares is None else shares
    copies = len(attention.branch_names)
    converted = dict(weights)
    layers = [name.removesuffix(".k.weight") for name in weights if name.endswith(".k.weight")]
    for layer in layers:
        v = weights[f"{layer}.v.weight"]
        for part in ("weight", "bias") if config.qkv_bias else ("weight",):
            k, values = weights[f"{layer}.k.{part}"], weights[f"{layer}.v.{part}"]
            converted[f"{layer}.k.{part}"] = torch.cat([k] * copies)
            scaled = [2 * shares[branch] * values for branch in attention.branch_names]
            converted[f"{layer}.v.{part}"] = torch.cat(scaled)
        gates = config.heads * len(attention.branch_names)
        converted[f"{layer}.gates.weight"] = v.new_zeros(gates, config.width)
        if attention.compressor == "pool":  # starts as the mean
            sizes = {"key": config.head_dim, "value": config.value_dim or config.head_dim}
            for part, size in sizes.items():
                start = BlockPool(attention.spec.block_len, config.kv_heads, size).state_dict()
                for name, value in start.items():
                    converted[f"{layer}.compress.{part}.{name}"] = value.to(v.dtype)
    return converted
