"""Baselines for NSA: PyTorch's SDPA and FlexAttention, and other implementations of NSA.

The latter are optional and imported on use, installed or from a folder on PYTHONPATH; if one is
missing, the reason is its result. Notes say where one computes something different from NSA.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nsa.bench.implementations import Implementation, Inputs
from nsa.bench.options import Shape
from nsa.ops import NSASpec, window_attention
from nsa.system import package_version

KERNELS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
FLEX_BLOCK = 128  # the only block size that all of FlexAttention's tile sizes divide
NSA_PYTORCH = "native-sparse-attention-pytorch"
# Optional library: its module, its distribution.
LIBRARIES = {
    "fla": ("fla.ops.nsa", "fla-core"),
    NSA_PYTORCH: ("native_sparse_attention_pytorch", NSA_PYTORCH),
    "scalable-flash-nsa": ("flash_nsa", "flash-nsa"),
    "flash-sparse-attention": ("fsa.ops", "flash-sparse-attention"),
}
SHARED_KV_NOTE = "keys and values shared by its branches; mean pooling included"
# They call flash-attn for their window; so does ours where that is faster (nsa bench tune).
OUR_WINDOW_NOTE = "; its window is nsa.ops.window_attention"
# fla always selects a query's own block, the one before it and the first: NSASpec's defaults.
FLA_SPEC = NSASpec(block_len=64, block_stride=64, select_len=64)


def sdpa(kernel: str, inputs: Inputs, shape: Shape) -> Implementation:
    """Return causal scaled_dot_product_attention, forced to one kernel.

    If the kernel rejects grouped heads or values narrower than keys, keys are repeated for every
    head or values padded before timing starts, as a user would have to.
    """
    q, k, v = inputs.q, inputs.k_sel, inputs.v_sel
    padded = F.pad(v, (0, shape.key - shape.value)) if shape.key > shape.value else v
    errors = []
    for pad in dict.fromkeys((False, shape.key != shape.value)):
        for repeat in (False, True):
            keys, values = k, padded if pad else v
            if repeat:
                keys, values = (x.repeat_interleave(shape.group, 2) for x in (k, values))
            function = partial(_sdpa, kernel, shape.value)
            probe = Implementation(function, *(x[:1, :128] for x in (q, keys, values)))
            try:
                probe.forward_backward()
            except RuntimeError as error:
                errors.append(" ".join(str(error).split()))
                continue
            notes = ["values padded to the keys' size"] * pad
            notes += ["keys and values repeated"] * repeat
            return Implementation(function, q, keys, values, note="; ".join(notes))
    raise RuntimeError(f"{kernel} supports none of these layouts: {errors[0]}")


def _sdpa(kernel: str, value_size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(KERNELS[kernel]):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return o.transpose(1, 2)[..., :value_size]


def flex(inputs: Inputs, spec: NSASpec | None) -> Implementation:
    """Return FlexAttention, compiled on a GPU; dense causal or, with a spec, block-sparse.

    The mask has as many selected positions as NSA and its window, but 128 neighbouring queries and
    all heads share it, because FlexAttention skips blocks of 128 x 128. Without a compressed
    branch it is a lower bound of what the pattern could cost there.
    """
    mask = block_mask(inputs.q.shape[1], spec, inputs.q.device)
    attend: Callable[..., Tensor] = flex_attention
    if inputs.q.is_cuda:
        attend = compiled_flex()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    note = "" if spec is None else "selection shared by 128 queries and all heads, no compression"
    return Implementation(run, inputs.q, inputs.k_sel, inputs.v_sel, note=note)


def compiled_flex() -> Callable[..., Tensor]:
    """Return FlexAttention, compiled separately for each length, mask and mode.

    One kernel for all lengths would mask every tile. `fullgraph` turns the silent fallback to T x T
    scores into an error.
    """
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def block_mask(seq_len: int, spec: NSASpec | None, device: torch.device) -> BlockMask:
    """Build the mask from its block table; `create_block_mask` would write a T x T mask first."""
    count = -(-seq_len // FLEX_BLOCK)
    row, column = torch.arange(count, device=device)[:, None], torch.arange(count, device=device)
    full = (column < row).expand(count, count)
    if spec is not None:
        selected = -(-spec.select_top * spec.select_len // FLEX_BLOCK)
        score = torch.rand(count, count, device=device).masked_fill(column >= row, -1)
        kept = score >= score.topk(min(selected, count), -1).values[:, -1:]
        near = column > row - 1 - -(-spec.window // FLEX_BLOCK)
        full = full & (kept | near)
    visible = full | (column == row)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Compute the full mask: FlexAttention requires it, kernels read it on the diagonal."""
        return (query >= key) & visible[query // FLEX_BLOCK, key // FLEX_BLOCK]

    partial_count, partial_index = _kv_blocks(column == row)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        *_kv_blocks(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=_causal if spec is None else mask,
        seq_lengths=(seq_len, seq_len),
    )


def _kv_blocks(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks per row [1, 1, rows], and all indices, the row's own first [1, 1, rows, n]."""
    order = table.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def versions() -> dict[str, str | None]:
    """Return each optional library's installed version; one from a folder has none."""
    return {name: package_version(distribution) for name, (_, distribution) in LIBRARIES.items()}


def load(name: str) -> ModuleType:
    """Import an optional library; raise ImportError for any error."""
    module, distribution = LIBRARIES[name]
    try:
        return importlib.import_module(module)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ImportError(f"{distribution} cannot be imported: {reason}") from error


def fla(inputs: Inputs, shape: Shape, *, window: bool) -> Implementation:
    """Return fla's NSA with mean pooling, with or without our window."""
    if shape.group < 16 or shape.group & (shape.group - 1):
        raise ValueError(f"fla needs a group of 16, 32, ... query heads; here it is {shape.group}")
    parallel_nsa, spec = load("fla").parallel_nsa, FLA_SPEC

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        g_cmp, g_sel, g_win = gates.unbind(-1)
        o = parallel_nsa(
            q,
            k,
            v,
            g_cmp=g_cmp,
            g_slc=g_sel,
            block_counts=spec.select_top,
            block_size=spec.select_len,
            window_size=0,
        )
        if not window:
            return o
        return torch.addcmul(o, window_attention(q, k, v, spec.window), g_win[..., None])

    note = SHARED_KV_NOTE + OUR_WINDOW_NOTE * window
    return Implementation(run, inputs.q, inputs.k_sel, inputs.v_sel, inputs.gates, note=note)


class _Mean(nn.Module):
    """φ over blocks [..., l, D]."""

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks.mean(-2)


def pytorch_nsa(inputs: Inputs, shape: Shape, spec: NSASpec) -> Implementation:
    """Return native-sparse-attention-pytorch's module without its projections, φ a mean."""
    on_gpu = inputs.q.is_cuda
    if shape.key != shape.value:
        raise ValueError("its keys and values have one size")
    if on_gpu and (shape.key > 128 or 16 % shape.group):
        raise ValueError("its kernel takes heads of up to 128, and groups that divide 16")
    sparse_attention = load(NSA_PYTORCH).SparseAttention
    packed = torch.cat([x.flatten(2) for x in (inputs.q, inputs.k_sel, inputs.v_sel)], -1)
    module = sparse_attention(
        dim=packed.shape[-1],
        dim_head=shape.key,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        sliding_window_size=spec.window,
        compress_block_size=spec.block_len,
        compress_block_sliding_stride=spec.block_stride,
        selection_block_size=spec.select_len,
        num_selected_blocks=spec.select_top - 1,  # it adds a query's own block
        causal=True,
        norm=False,
        compress_mlp=_Mean(),
        use_triton_kernel=on_gpu,
    )
    module.to_qkv, module.combine_heads = nn.Identity(), nn.Identity()
    module.to(packed)

    def run(qkv: Tensor) -> Tensor:
        return module(qkv).unflatten(-1, (shape.heads, shape.key))

    note = "takes packed q, k and v; RoPE and the gate projection included; no forced first block"
    note += "; its selected branch computes in fp16" * on_gpu
    return Implementation(run, packed, note=note)


def _packed(inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v as [B·T, H, D], and cu_seqlens with a document per sequence."""
    batch, seq_len = inputs.q.shape[:2]
    offsets = torch.arange(batch + 1, device=inputs.q.device, dtype=torch.int32) * seq_len
    return [x.flatten(0, 1) for x in (inputs.q, inputs.k_sel, inputs.v_sel)], offsets


def _window(inputs: Inputs, spec: NSASpec) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return our window on [B·T, H, D]."""
    batch = inputs.q.shape[0]

    def window(*qkv: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (batch, -1)) for x in qkv)
        return window_attention(q, k, v, spec.window).flatten(0, 1)

    return window


def scalable_flash_nsa(inputs: Inputs, shape: Shape, spec: NSASpec) -> Implementation:
    """Return the parts of Scalable-Flash-Native-Sparse-Attention's module; φ is a mean."""
    library = load("scalable-flash-nsa")
    config = library.NSAConfig(
        qk_head_dim=shape.key,
        v_head_dim=shape.value,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        kernel_size=spec.block_len,
        stride=spec.block_stride,
        block_size=spec.select_len,
        top_n=spec.select_top,
        num_init_blocks=spec.init_blocks,
        num_local_blocks=spec.local_blocks,
        window_size=spec.window,
    )
    module, window = library.HFNSACore(config), _window(inputs, spec)
    qkv, offsets = _packed(inputs)
    combine = importlib.import_module("flash_nsa.ops.combine").fused_sigmoid_combine

    def run(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
        library.NSAHelper.init_cu_seqlens(offsets)
        k_cmp, v_cmp = module.compress_k(k), module.compress_v(v)
        o_cmp, lse = library.compress_attn(q, k_cmp, v_cmp, sm_scale=module.sm_scale)
        index, _ = library.slc_topk_indices(
            q, k_cmp, lse, sm_scale=module.sm_scale, maybe_efficient_version=True
        )
        o_sel = library.select_attn(q, k, v, index, sm_scale=module.sm_scale)
        return combine(o_cmp, o_sel, window(q, k, v), logits).unflatten(0, inputs.q.shape[:2])

    logits = torch.logit(inputs.gates.flatten(0, 1).float(), 1e-3).to(inputs.gates.dtype)
    note = SHARED_KV_NOTE + "; gates are logits" + OUR_WINDOW_NOTE
    return Implementation(run, *qkv, logits, note=note)


def flash_sparse_attention(inputs: Inputs, shape: Shape, spec: NSASpec) -> Implementation:
    """Return Flash-Sparse-Attention's kernels in the order of its module, φ a mean.

    Like the module, it runs its own selected kernel for groups of up to 8 query heads.
    """
    if shape.key != shape.value:
        raise ValueError("its keys and values have one size")
    own = load("flash-sparse-attention").FSA_topk_sparse_attention
    library = importlib.import_module("nsa_ref.ops")
    selected = own if shape.group <= 8 else library.topk_sparse_attention
    qkv, offsets = _packed(inputs)
    window = _window(inputs, spec)
    seq_len, count = inputs.q.shape[1], spec.compressed_len(inputs.q.shape[1])
    pooled_offsets = offsets // seq_len * count
    pooling, selection = (spec.block_len, spec.block_stride), (spec.select_len, spec.select_top)
    lengths, forced = (
        (offsets, pooled_offsets, seq_len, count),
        (spec.init_blocks, spec.local_blocks),
    )

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        k_cmp, v_cmp = (library.avgpool_compress(x, None, offsets, *pooling)[0] for x in (k, v))
        o_cmp, index = library.compressed_attention(
            q, k_cmp, v_cmp, *pooling, *selection, *lengths, None, *forced
        )
        o_sel = selected(q, k, v, index, spec.select_len, offsets, None)
        g_cmp, g_sel, g_win = (gate[..., None] for gate in gates.unbind(-1))
        o = o_cmp * g_cmp + o_sel * g_sel + window(q, k, v) * g_win
        return o.unflatten(0, inputs.q.shape[:2])

    note = SHARED_KV_NOTE + OUR_WINDOW_NOTE
    return Implementation(run, *qkv, inputs.gates.flatten(0, 1), note=note)
