"""From plain causal attention to NSA, so that training begins about where the dense model ended.

    gates 0, each ½:       o = ½ (o_cmp + o_sel + o_win)
    K_c = K, V_c = 2 s_c V:  o = s_cmp · A_cmp V + s_sel · A_sel V + s_win · A_win V

The selected branch sees all of a text of select_top · select_len tokens, and the window all of one
of `window` tokens. So with s_cmp = 0 and s_sel + s_win = 1 the start computes what the dense model
does on texts that both see, and about that on longer ones. The compressed branch chooses the blocks
from the start, by the means of the dense model's keys; what it adds itself begins at nothing and is
learned, as its values' gradient is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.model.config import AttentionConfig, ModelConfig

Weights = dict[str, Tensor]


def usual_shares(attention: AttentionConfig) -> dict[str, float]:
    """How much of the dense output each branch gives at the start, in all 1."""
    names = attention.branch_names
    exact = [name for name in names if name != "cmp"] or list(names)
    if attention.shared_kv:  # one V for all: none can be left out
        exact = list(names)
    return {name: (name in exact) / len(exact) for name in names}


def make_room(config: ModelConfig) -> None:
    """Widen an mlp φ to what it takes to be the mean: two hidden units for each of its outputs."""
    attention = config.attention
    if attention.compressor != "mlp":
        return
    needed = 2 * max(config.head_dim, config.value_dim or config.head_dim)
    attention.compressor_hidden = attention.compressor_hidden or needed
    if attention.compressor_hidden < needed:
        raise ValueError(
            f"model.attention.compressor_hidden = {attention.compressor_hidden}: a φ that begins "
            f"as the mean needs {needed} or more; leave it null"
        )


def to_sparse(
    weights: Weights, config: ModelConfig, shares: dict[str, float] | None = None
) -> Weights:
    """The weights of the NSA model `config` that computes about what a dense one does.

    `config` is that of the NSA model; all but the attention is the dense model's.
    """
    attention = config.attention
    shares = usual_shares(attention) if shares is None else shares
    copies = 1 if attention.shared_kv else len(attention.branch_names)
    found = dict(weights)
    layers = [name.removesuffix(".k.weight") for name in weights if name.endswith(".k.weight")]
    for name in layers:
        k, v = found[f"{name}.k.weight"], found[f"{name}.v.weight"]
        found[f"{name}.k.weight"] = k.repeat(copies, 1)
        scaled = [2 * shares[branch] * v for branch in attention.branch_names]
        found[f"{name}.v.weight"] = torch.cat(scaled[:copies])
        gates = config.heads * len(attention.branch_names)
        found[f"{name}.gates.weight"] = v.new_zeros(gates, config.width)
        if attention.compressor == "mlp":
            sizes = {"key": config.head_dim, "value": config.value_dim or config.head_dim}
            for part, size in sizes.items():
                for weight, value in _mean(attention, size, v).items():
                    found[f"{name}.compress.{part}.{weight}"] = value
    return found


def _mean(attention: AttentionConfig, size: int, like: Tensor) -> Weights:
    """An mlp φ that is the mean: gelu(z) − gelu(−z) = z."""
    length, hidden = attention.spec.block_len, attention.compressor_hidden or 2 * size
    one = torch.eye(size, dtype=like.dtype)
    mean = one.repeat(1, length) / length
    up, down = like.new_zeros(hidden, length * size), like.new_zeros(size, hidden)
    up[: 2 * size] = torch.cat([mean, -mean])
    down[:, : 2 * size] = torch.cat([one, -one], 1)
    return {"position": like.new_zeros(length, size), "up.weight": up, "down.weight": down}
