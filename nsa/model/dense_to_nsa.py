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
    if attention.shared_kv:
        return dict.fromkeys(names, 1 / len(names))
    first = next(name for name in ("sel", "win", "cmp") if name in names)
    return {name: float(name == first) for name in names}


def widen_mlp_compressor(config: ModelConfig) -> None:
    """Set the mlp φ's hidden size so that it can represent the mean: two units per output."""
    attention = config.attention
    if attention.compressor != "mlp":
        return
    needed = 2 * max(config.head_dim, config.value_dim or config.head_dim)
    attention.compressor_hidden = attention.compressor_hidden or needed
    if attention.compressor_hidden < needed:
        raise ValueError(
            f"model.attention.compressor_hidden = {attention.compressor_hidden}: an mlp φ that "
            f"starts as the mean needs {needed} or more; omit the setting"
        )


def dense_to_nsa(
    weights: Weights, config: ModelConfig, shares: dict[str, float] | None = None
) -> Weights:
    """Convert a dense model's weights to those of `config`, which differs in its attention only."""
    attention = config.attention
    shares = default_shares(attention) if shares is None else shares
    copies = 1 if attention.shared_kv else len(attention.branch_names)
    converted = dict(weights)
    layers = [name.removesuffix(".k.weight") for name in weights if name.endswith(".k.weight")]
    for layer in layers:
        v = weights[f"{layer}.v.weight"]
        for part in ("weight", "bias") if config.qkv_bias else ("weight",):
            k, values = weights[f"{layer}.k.{part}"], weights[f"{layer}.v.{part}"]
            converted[f"{layer}.k.{part}"] = torch.cat([k] * copies)
            scaled = [2 * shares[branch] * values for branch in attention.branch_names]
            converted[f"{layer}.v.{part}"] = torch.cat(scaled[:copies])
        gates = config.heads * len(attention.branch_names)
        converted[f"{layer}.gates.weight"] = v.new_zeros(gates, config.width)
        if attention.compressor in ("mlp", "pool"):  # starts as the mean
            sizes = {"key": config.head_dim, "value": config.value_dim or config.head_dim}
            for part, size in sizes.items():
                if attention.compressor == "mlp":
                    start = _mean_mlp(attention, size, v)
                else:
                    start = BlockPool(attention.spec.block_len, config.kv_heads, size).state_dict()
                for name, value in start.items():
                    converted[f"{layer}.compress.{part}.{name}"] = value.to(v.dtype)
    return converted


def _mean_mlp(attention: AttentionConfig, size: int, like: Tensor) -> Weights:
    """Return weights of a BlockMLP that computes the mean, because gelu(z) − gelu(−z) = z."""
    length, hidden = attention.spec.block_len, attention.compressor_hidden or 2 * size
    one = torch.eye(size, dtype=like.dtype)
    mean = one.repeat(1, length) / length
    up, down = like.new_zeros(hidden, length * size), like.new_zeros(size, hidden)
    up[: 2 * size] = torch.cat([mean, -mean])
    down[:, : 2 * size] = torch.cat([one, -one], 1)
    return {"position": like.new_zeros(length, size), "up.weight": up, "down.weight": down}
