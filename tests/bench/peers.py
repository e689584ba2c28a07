"""Implementations to time: PyTorch's SDPA and FlexAttention, and other libraries' NSA.

The latter are optional and imported on use, installed or from a folder on PYTHONPATH; if one is
missing, the reason is its result. Their branches share keys and values, and mean pooling is timed
with them. One that calls flash-attn for its window gets nsa.ops.window_attention instead.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nsa.ops import NSASpec, window_attention
from tests.inputs import Inputs

FLEX_BLOCK = 128  # the only block size that all of FlexAttention's tile sizes divide
# fla always selects a query's own block, the one before it and the first: NSASpec's defaults.
FLA_SPEC = NSASpec(block_len=64, block_stride=64, select_len=64)


class Implementation:
    """`function(*inputs)` returns attention's output; floating-point inputs get gradients."""

    def __init__(
        self, function: Callable[..., Tensor], *inputs: Tensor, differentiable: bool = True
    ) -> None:
        self.function, self.differentiable = function, differentiable
        self.inputs = [
            x.detach().requires_grad_(differentiable and x.is_floating_point()) for x in inputs
        ]
        self._grad_output: Tensor | None = None

    def forward(self) -> Tensor:
        """Run as in inference: nothing is saved for a backward pass."""
        with torch.no_grad():
            return self.function(*(x.detach() for x in self.inputs))

    def forward_backward(self) -> object:
        """Run as in training, with a fixed gradient of the output."""
        o = self.function(*self.inputs)
        if self._grad_output is None:
            self._grad_output = torch.randn_like(o)
        inputs = [x for x in self.inputs if x.requires_grad]
        return torch.autograd.grad(o, inputs, self._grad_output)


def sdpa(kernel: SDPBackend, inputs: Inputs) -> Implementation:
    """Return causal scaled_dot_product_attention, forced to one kernel."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(kernel):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2)

    return Implementation(run, inputs.q, inputs.k_sel, inputs.v_sel)


def flex(inputs: Inputs, **options: str) -> Implementation:
    """Return causal FlexAttention, on a GPU compiled for each length and mode.

    One kernel for all lengths would mask every tile. `fullgraph` turns the silent fallback to T x T
    scores into an error. `options` are FlexAttention's kernel options.
    """
    mask = causal_mask(inputs.q.shape[1], inputs.q.device)
    attend: Callable[..., Tensor] = flex_attention
    if inputs.q.is_cuda:
        torch._dynamo.config.recompile_limit = 64
        attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        more: Any = {"kernel_options": options} if options else {}
        return attend(q, k, v, block_mask=mask, enable_gqa=True, **more).transpose(1, 2)

    return Implementation(run, inputs.q, inputs.k_sel, inputs.v_sel)


def causal_mask(seq_len: int, device: torch.device) -> BlockMask:
    """Build the mask from its block table; `create_block_mask` would write a T x T mask first."""
    blocks = torch.arange(-(-seq_len // FLEX_BLOCK), dtype=torch.int32, device=device)
    # Row r has r full blocks, 0 to r - 1, and one partial block, r.
    order = (blocks + blocks[:, None]) % len(blocks)
    return BlockMask.from_kv_blocks(
        torch.ones_like(blocks)[None, None],
        order[None, None],
        blocks[None, None],
        blocks.expand(len(blocks), -1).contiguous()[None, None],
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda batch, head, query, key: query >= key,
        seq_lengths=(seq_len, seq_len),
    )


def fla(inputs: Inputs) -> Implementation:
    """Return fla's compressed and selected attention with mean pooling."""
    group = inputs.q.shape[2] // inputs.k_sel.shape[2]
    if group < 16 or group & (group - 1):
        raise ValueError(f"fla needs a group of 16, 32, ... query heads; here it is {group}")
    parallel_nsa = import_module("fla.ops.nsa").parallel_nsa

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        g_cmp, g_sel, _ = gates.unbind(-1)
        sizes = {"block_counts": FLA_SPEC.select_top, "block_size": FLA_SPEC.select_len}
        return parallel_nsa(q, k, v, g_cmp=g_cmp, g_slc=g_sel, window_size=0, **sizes)

    return Implementation(run, inputs.q, inputs.k_sel, inputs.v_sel, inputs.gates)


def scalable_flash_nsa(inputs: Inputs, spec: NSASpec) -> Implementation:
    """Return the parts of Scalable-Flash-Native-Sparse-Attention's module; its gates are logits."""
    library = import_module("flash_nsa")
    config = library.NSAConfig(
        qk_head_dim=inputs.q.shape[-1],
        v_head_dim=inputs.v_sel.shape[-1],
        num_heads=inputs.q.shape[2],
        num_kv_heads=inputs.k_sel.shape[2],
        kernel_size=spec.block_len,
        stride=spec.block_stride,
        block_size=spec.select_len,
        top_n=spec.select_top,
        num_init_blocks=spec.init_blocks,
        num_local_blocks=spec.local_blocks,
        window_size=spec.window,
    )
    module = library.HFNSACore(config)
    combine = import_module("flash_nsa.ops.combine").fused_sigmoid_combine
    batch, seq_len = inputs.q.shape[:2]  # each sequence is a document
    offsets = torch.arange(batch + 1, device=inputs.q.device, dtype=torch.int32) * seq_len

    def window(*qkv: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (batch, -1)) for x in qkv)
        return window_attention(q, k, v, spec.window).flatten(0, 1)

    def run(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
        library.NSAHelper.init_cu_seqlens(offsets)
        k_cmp, v_cmp = module.compress_k(k), module.compress_v(v)
        o_cmp, lse = library.compress_attn(q, k_cmp, v_cmp, sm_scale=module.sm_scale)
        index, _ = library.slc_topk_indices(
            q, k_cmp, lse, sm_scale=module.sm_scale, maybe_efficient_version=True
        )
        o_sel = library.select_attn(q, k, v, index, sm_scale=module.sm_scale)
        return combine(o_cmp, o_sel, window(q, k, v), logits).unflatten(0, (batch, -1))

    logits = torch.logit(inputs.gates.flatten(0, 1).float(), 1e-3).to(inputs.gates.dtype)
    qkv = (x.flatten(0, 1) for x in (inputs.q, inputs.k_sel, inputs.v_sel))
    return Implementation(run, *qkv, logits)
