"""Other implementations of NSA, each optional: who is not installed is listed with the reason.

Nothing of theirs is imported before it is asked for. What each computes differs, and is said in
its note; comparisons with the same pattern are made where a peer's limits allow.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor, nn

from nsa.bench.contenders import Contender, Refused
from nsa.bench.inputs import Inputs
from nsa.bench.shapes import Shape
from nsa.ops import NSASpec, window_attention

# Peer, its module, the distribution that brings it.
PEERS = {
    "fla": ("fla.ops.nsa", "fla-core"),
    "native-sparse-attention-pytorch": (
        "native_sparse_attention_pytorch",
        "native-sparse-attention-pytorch",
    ),
}
# fla takes a query's own block and the one before it, and the first: always.
FLA_SPEC = NSASpec(block_len=64, block_stride=64, select_len=64)


def versions() -> dict[str, dict[str, str | None]]:
    """Each peer's version, or why it is absent."""
    found = {}
    for name, (_, distribution) in PEERS.items():
        try:
            load(name)
            found[name] = {"version": importlib.metadata.version(distribution), "absent": None}
        except ImportError as reason:
            found[name] = {"version": None, "absent": str(reason)}
    return found


def load(name: str) -> ModuleType:
    """The peer's module; an ImportError says what is missing."""
    module, distribution = PEERS[name]
    try:
        return importlib.import_module(module)
    except (
        Exception
    ) as error:  # a peer that breaks while it is imported is as absent as one missing
        reason = " ".join(str(error).split())
        raise ImportError(f"{distribution} cannot be imported: {reason}") from error


def fla(inputs: Inputs, shape: Shape, spec: NSASpec, *, window: bool) -> Contender:
    """Mean pooling, compression and selection; its window needs flash-attn, else ours stands in."""
    if not spec.block_len == spec.block_stride == spec.select_len:
        raise Refused("fla has one block size for compression, stride and selection")
    _check_group(shape)
    parallel_nsa = load("fla").parallel_nsa
    own_window = window and find_spec("flash_attn") is not None

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        g_cmp, g_sel, g_win = gates.unbind(-1)
        o = parallel_nsa(
            q,
            k,
            v,
            g_cmp=g_cmp,
            g_slc=g_sel,
            g_swa=g_win if own_window else None,
            block_counts=spec.select_top,
            block_size=spec.select_len,
            window_size=spec.window if own_window else 0,
        )
        if own_window or not window:
            return o
        return torch.addcmul(o, window_attention(q, k, v, spec.window), g_win[..., None])

    note = "keys and values shared by its branches; mean pooling included"
    if window and not own_window:
        note += "; flash-attn is absent, so its window is nsa.ops.window_attention"
    return Contender(run, inputs.q, inputs.k_sel, inputs.v_sel, inputs.gates, note=note)


def fla_selected(inputs: Inputs, shape: Shape, spec: NSASpec, index: Tensor) -> Contender:
    """fla's selected branch alone, over blocks that are given to it."""
    _check_group(shape)
    parallel_nsa = load("fla").parallel_nsa

    def run(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor) -> Tensor:
        return parallel_nsa(
            q,
            k,
            v,
            block_indices=block_indices,
            block_counts=spec.select_top,
            block_size=spec.select_len,
        )

    note = "it pools keys and values too, though nothing reads that"
    return Contender(run, inputs.q, inputs.k_sel, inputs.v_sel, index, note=note)


def _check_group(shape: Shape) -> None:
    if shape.group < 16 or shape.group & (shape.group - 1):
        raise Refused(f"fla needs a group of 16, 32, ... query heads; here it is {shape.group}")


class _Mean(nn.Module):
    """φ for the peer's blocks [..., l, D]."""

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks.mean(-2)


def pytorch_nsa(inputs: Inputs, shape: Shape, spec: NSASpec) -> Contender:
    """native-sparse-attention-pytorch's module, its projections taken out and φ a mean."""
    on_gpu = inputs.q.device.type == "cuda"
    if shape.key != shape.value:
        raise Refused("its keys and values have one size")
    if on_gpu and (shape.key > 128 or 16 % shape.group):
        raise Refused("its kernel takes heads of up to 128, and groups that divide 16")
    sparse_attention = load("native-sparse-attention-pytorch").SparseAttention
    packed = torch.cat([x.flatten(2) for x in (inputs.q, inputs.k_sel, inputs.v_sel)], -1)
    width = packed.shape[-1]
    module = sparse_attention(
        dim=width,
        dim_head=shape.key,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        sliding_window_size=spec.window,
        compress_block_size=spec.block_len,
        compress_block_sliding_stride=spec.block_stride,
        selection_block_size=spec.select_len,
        num_selected_blocks=spec.select_top - 1,  # a query's own block comes on top
        causal=True,
        norm=False,
        compress_mlp=_Mean(),
        use_triton_kernel=on_gpu,
    )
    module.to_qkv, module.combine_heads = nn.Identity(), nn.Identity()
    module.to(packed)

    def run(qkv: Tensor) -> Tensor:
        return module(qkv).unflatten(-1, (shape.heads, shape.key))

    note = (
        "q, k and v given packed; rotary positions and the gates' projection included; no forced "
        "first block; its selected branch computes in fp16"
    )
    return Contender(run, packed, note=note if on_gpu else note.rpartition(";")[0])
