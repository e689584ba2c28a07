"""PyTorch's own attention beside NSA: SDPA by one kernel at a time, and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nsa.bench.contenders import Contender
from nsa.bench.inputs import Inputs
from nsa.bench.shapes import Shape
from nsa.ops import NSASpec

# Dense causal attention, the best of which NSA is held against.
DENSE = ("sdpa-flash", "sdpa-cudnn", "flex-causal")
KERNELS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
FLEX_BLOCK = 128  # the only block size that every one of FlexAttention's own tile sizes divides


def sdpa(kernel: str, inputs: Inputs, shape: Shape) -> Contender:
    """Causal scaled_dot_product_attention by this kernel alone.

    Where the kernel refuses grouped heads or values narrower than keys, it gets what a user would
    give it instead, made before the clock starts: keys repeated for every head, values padded.
    """
    q, k, v = inputs.q, inputs.k_sel, inputs.v_sel
    padded = F.pad(v, (0, shape.key - shape.value)) if shape.key > shape.value else v
    refusals = []
    for wide in dict.fromkeys((False, shape.key != shape.value)):
        for repeated in (False, True):
            values = padded if wide else v
            keys = k
            if repeated:
                keys, values = (x.repeat_interleave(shape.group, 2) for x in (k, values))
            attend = partial(_sdpa, kernel, shape.value)
            probe = Contender(attend, *(x[:1, :128] for x in (q, keys, values)))
            try:
                probe.both()
            except RuntimeError as refusal:
                refusals.append(" ".join(str(refusal).split()))
                continue
            said = ("values padded to the keys' size", wide), ("keys and values repeated", repeated)
            note = "; ".join(text for text, holds in said if holds)
            return Contender(attend, q, keys, values, note=note)
    raise RuntimeError(f"{kernel} serves none of these: {refusals[0]}")


def _sdpa(kernel: str, value_size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(KERNELS[kernel]):
        o = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    return o.transpose(1, 2)[..., :value_size]


def flex(inputs: Inputs, spec: NSASpec | None) -> Contender:
    """FlexAttention, compiled on a GPU: dense causal or, with a spec, over a block-sparse mask.

    The mask holds as many selected positions as NSA's and its window, but 128 neighbouring queries
    and all heads share them, for blocks of 128 x 128 are what FlexAttention skips well. There is
    no compressed branch: it bounds from below what this pattern could cost there.
    """
    device, seq_len = inputs.q.device, inputs.q.shape[1]
    mask = block_mask(seq_len, spec, device)
    attend: Callable[..., Tensor] = flex_attention
    if device.type == "cuda":
        attend = compiled()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    note = "" if spec is None else "selection shared by 128 queries and all heads, no compression"
    return Contender(run, inputs.q, inputs.k_sel, inputs.v_sel, note=note)


def compiled() -> Callable[..., Tensor]:
    """FlexAttention with each length, mask and mode as a version of its own.

    For any length there would be one whose kernel masks every tile. Past the limit it would run
    uncompiled and write out T x T scores; with fullgraph that is an error instead.
    """
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def block_mask(seq_len: int, spec: NSASpec | None, device: torch.device) -> BlockMask:
    """Built from its block table: the usual way would first write a mask of T x T."""
    count = -(-seq_len // FLEX_BLOCK)
    row, column = torch.arange(count, device=device)[:, None], torch.arange(count, device=device)
    full = (column < row).expand(count, count)
    if spec is not None:
        chosen = -(-spec.select_top * spec.select_len // FLEX_BLOCK)
        score = torch.rand(count, count, device=device).masked_fill(column >= row, -1)
        kept = score >= score.topk(min(chosen, count), -1).values[:, -1:]
        near = column > row - 1 - -(-spec.window // FLEX_BLOCK)
        full = full & (kept | near)
    listed = full | (column == row)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """All of the mask, as FlexAttention asks for; the kernel needs it on the diagonal alone."""
        return (query >= key) & listed[query // FLEX_BLOCK, key // FLEX_BLOCK]

    partial_count, partial_index = _ordered(column == row)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        *_ordered(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=_causal if spec is None else mask,
        seq_lengths=(seq_len, seq_len),
    )


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and its blocks first among all, both for one batch and head."""
    order = table.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
