"""Small models and inputs for the model tests."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.attention import NSAttention
from nsa.model.compressor import BlockPool
from nsa.model.config import INIT_STD, SUBSETS
from nsa.spec import NSASpec

SPEC = NSASpec(4, 2, 4, 3, 1, 1, 6)  # one block of three is selected by importance
ONE_KEY = NSASpec(4, 4, 4, 3, 1, 1)  # an index key per selection block
PER_TOKEN = replace(ONE_KEY, block_len=1, block_stride=1)  # an index key per token
# Every kind of attention that a model can have.
ATTENTIONS = {
    "dense": AttentionConfig(kind="dense"),
    "index": AttentionConfig(spec=ONE_KEY, branches="sel", compressor="pool", selector_loss=1.0),
    "index, mean": AttentionConfig(
        spec=replace(SPEC, window=512), branches="sel", selector_loss=1.0
    ),
    "mean": AttentionConfig(spec=SPEC),
    "pool": AttentionConfig(spec=SPEC, compressor="pool"),
    "mlp": AttentionConfig(spec=SPEC, compressor="mlp"),
}
# Ablations: attention without one of the three branches.
SUBSETS_OF_BRANCHES = {
    names: AttentionConfig(spec=SPEC, branches=names)
    for names in SUBSETS
    if names not in ("cmp+sel+win", "sel")
}
SUBSETS_OF_BRANCHES["cmp+win, mlp"] = replace(SUBSETS_OF_BRANCHES["cmp+win"], compressor="mlp")
NAMED = ATTENTIONS | SUBSETS_OF_BRANCHES
# What the models of other libraries may have, and ours has not by default.
IMPORTED: dict[str, Any] = {
    "qkv_bias": True,
    "qk_norm": True,
    "no_rope_every": 2,
    "rope_type": "yarn",
    "rope_extension": {"factor": 4.0, "original_max_position_embeddings": 16.0},
    "tied_head": False,
}


def tiny(attention: str | AttentionConfig = "mean", **changes: Any) -> ModelConfig:
    """Two layers, two KV heads with two query heads each, and different key and value sizes."""
    config = ModelConfig(
        vocab_size=61,
        layers=2,
        width=24,
        heads=4,
        kv_heads=2,
        head_dim=6,
        value_dim=5,
        mlp_width=32,
        attention=replace(NAMED[attention] if isinstance(attention, str) else attention),
    )
    return replace(config, **changes)


def build(
    config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0, std: float = INIT_STD
) -> LanguageModel:
    """Build a reproducible model without parameters whose start would hide an error.

    Gates differ from ½, so that their order matters, all branches have values, an index is not the
    attention's queries and keys, φ `pool` is not the mean, and biases and norms of q and k have an
    effect.
    """
    torch.manual_seed(seed)
    model = LanguageModel(config)
    model.initialize(std)
    for layer in model.modules():
        if not isinstance(layer, NSAttention):
            continue
        if layer.index is not None:
            torch.nn.init.normal_(layer.index.q.weight, std=0.3)
            torch.nn.init.normal_(layer.index.k.weight, std=0.3)
            continue
        torch.nn.init.normal_(layer.gates.weight, std=0.3)
        torch.nn.init.normal_(layer.v.weight, std=std)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    for module in model.modules():
        if isinstance(module, BlockPool):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def step(
    model: LanguageModel, ids: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the next tokens, and all gradients."""
    model.zero_grad()
    loss = model(ids, labels=ids.roll(-1, 1), cu_seqlens=cu_seqlens)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def tokens(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(61, (batch, length), generator=draw)


def packed(*lengths: int) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def flop_counter() -> FlopCounterMode:
    """PyTorch's counter, which does not look into operations of ours, with those of products."""

    def loss(hidden: Any, weight: Any, labels: Any, gradients: bool, **_: Any) -> int:
        return 2 * hidden.numel() * weight[0] * (3 if gradients else 1)

    ops: dict[Any, Any] = {
        torch.ops.nsa.linear_cross_entropy: loss,
        torch.ops.nsa.pool: lambda x, weight, *_, **__: 2 * x.numel() * weight[-1],
        torch.ops.nsa.pool_backward: lambda _, x, weight, *__, **___: 4 * x.numel() * weight[-1],
    }
    return FlopCounterMode(display=False, custom_mapping=ops)
