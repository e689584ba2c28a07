"""RoPE, gates and mean-pooled keys and values from one packed projection.

    packed [B, T, P]   q heads | k sets × heads | v sets × heads | index q, k | gate logits | pad
      -> q, gates, k_cmp, v_cmp, keys and values of up to 3 sets, queries and keys of an index
         all contiguous; q, the sets' keys, their means and the index's queries have RoPE

One op reads each column once; its backward pass writes the gradient of `packed`, each column once.
Blocks overlap, so the gradient of pooling is a gather: a token reads the few blocks that cover it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import triton
from nsa.ops.backend import dispatch
from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import PackedLayout, RotaryPoolInputs


class RotaryPooled(NamedTuple):
    """Outputs of `rotary_pool`; a set that the layout does not return has no elements."""

    q: Tensor  # [B, T, Hq, Dk], rotated
    gates: Tensor | None  # [B, T, Hq, gates]
    compressed: tuple[Tensor, Tensor] | None  # [B, N or T, Hkv, D]: means by block, or pre-RoPE
    kv_sets: list[tuple[Tensor, Tensor]]  # rotated keys and values [B, T, Hkv, D]
    indexed: tuple[Tensor, Tensor] | None  # rotated queries, keys without RoPE [B, T, Hkv, Dk]


def rotary_pool(
    packed: Tensor,
    layout: PackedLayout,
    cos: Tensor,
    sin: Tensor,
    block_tokens: Tensor | None = None,
    token_blocks: Tensor | None = None,
    *,
    backend: str = "auto",
) -> RotaryPooled:
    """Split `packed` [B, T, P] into the inputs of attention: RoPE, sigmoid of gates, means.

    cos and sin are float32 [T, 1, Dk / 2]. Means need both tables of the compressed blocks:
    `block_tokens` int64 [N, l] and its inverse `token_blocks` int64 [T, ⌈l/d⌉], padded with -1.
    """
    numbers = [int(number) for number in layout]
    inputs = RotaryPoolInputs(packed, cos, sin, block_tokens, token_blocks, numbers)
    _check(inputs, layout)
    # Views with the head sizes of keys and of values, by which `dispatch` decides.
    heads = (packed[:, :, None, :size] for size in (layout.key_dim, layout.value_dim))
    op = torch_rotary_pool
    if dispatch(backend, "rotary_pool", *heads) is triton:
        from nsa.ops.triton.rotary import triton_rotary_pool as op
    q, gates, k_cmp, v_cmp, *kv_sets, index_q, index_k = op(inputs)
    return RotaryPooled(
        q,
        gates if layout.gates else None,
        (k_cmp, v_cmp) if layout.mean or layout.pre_rope else None,
        list(zip(kv_sets[::2], kv_sets[1::2], strict=True)),
        (index_q, index_k) if layout.indexed else None,
    )


def _check(x: RotaryPoolInputs, layout: PackedLayout) -> None:
    """Raise a ValueError for inputs that do not fit the layout."""
    packed, token_blocks, columns = x.packed, x.token_blocks, sum(layout.columns)
    if packed.dim() != 3 or packed.shape[-1] < columns:
        raise ValueError(
            f"packed has shape {tuple(packed.shape)}; it must be [B, T, P] with P >= {columns}"
        )
    expected = (packed.shape[1], 1, layout.key_dim // 2)
    for name, table in (("cos", x.cos), ("sin", x.sin)):
        if table.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; it must be {expected}: [T, 1, Dk / 2]"
            )
    if not 1 <= layout.kv_sets <= 3:
        raise ValueError(f"layout.kv_sets = {layout.kv_sets}: must be 1 to 3")
    if layout.mean and layout.pre_rope:
        raise ValueError("layout.mean and layout.pre_rope exclude each other; drop one")
    if layout.mean and (x.block_tokens is None or token_blocks is None):
        raise ValueError("layout.mean requires block_tokens and token_blocks; pass both")
    if token_blocks is not None and token_blocks.shape[0] != packed.shape[1]:
        raise ValueError(
            f"token_blocks has {token_blocks.shape[0]} rows; it must have T = {packed.shape[1]}"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: rotate the two halves of each head of x [.., T, H, D] as pairs, in at least float32."""
    pairs = x.unflatten(-1, (2, -1))
    rotated = pairs * cos[..., None, :]
    rotated[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-1)
    rotated[..., 1, :].addcmul_(pairs[..., 0, :], sin)
    return rotated.flatten(-2)


def _forward(x: RotaryPoolInputs) -> tuple[Tensor, ...]:
    layout, dtype = x.read_layout(), x.packed.dtype
    # q, gates, k_cmp, v_cmp, k and v of 3 sets, an index's q and k; empty if the layout lacks them.
    outputs = [x.packed.new_empty(0) for _ in range(12)]
    q, keys, values, index, logits = layout.parts(x.packed.contiguous())
    outputs[0] = rotate(q[:, :, 0], x.cos, x.sin).to(dtype)
    if layout.gates:
        outputs[1] = torch.sigmoid(logits[:, :, 0]).contiguous()
    for number, (k, v) in enumerate(zip(keys.unbind(2), values.unbind(2), strict=True)):
        if number == 0 and layout.pre_rope:
            outputs[2:4] = _copy(k), _copy(v)
        pooled = number == 0 and layout.mean
        if pooled or layout.returns_set(number):
            k = rotate(k, x.cos, x.sin)
        if pooled:
            outputs[2:4] = _pool(x, k), _pool(x, v)
        if layout.returns_set(number):
            outputs[4 + 2 * number : 6 + 2 * number] = k.to(dtype), _copy(v)
    if layout.indexed:
        outputs[10:] = rotate(index[:, :, 0], x.cos, x.sin).to(dtype), _copy(index[:, :, 1])
    return tuple(outputs)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _pool(x: RotaryPoolInputs, tokens: Tensor) -> Tensor:
    """Means of `tokens` [B, T, Hkv, D] over blocks [B, N, Hkv, D], summed in at least float32."""
    assert x.block_tokens is not None
    blocks = tokens[:, x.block_tokens]  # [B, N, l, Hkv, D]
    dtype = torch.promote_types(x.packed.dtype, torch.float32)
    return blocks.mean(2, dtype=dtype).to(x.packed.dtype)


def _unpool(x: RotaryPoolInputs, gradient: Tensor) -> Tensor:
    """The gradient of `tokens` in `_pool`: each token's sum over the blocks that cover it."""
    assert x.block_tokens is not None
    assert x.token_blocks is not None
    dtype = torch.promote_types(x.packed.dtype, torch.float32)
    each = gradient.to(dtype) / x.block_tokens.shape[1]  # [B, N, Hkv, D]
    padded = F.pad(each, (0, 0, 0, 0, 0, 1))  # index -1 reads these zeros
    return padded[:, x.token_blocks].sum(2)


def _backward(*arguments: Any) -> Tensor:
    """The gradient of `packed`, from the outputs' 12 gradients, the inputs and the saved gates."""
    *gradients, x, gates = arguments
    layout = x.read_layout()
    packed = torch.empty_like(x.packed, memory_format=torch.contiguous_format)
    q, keys, values, index, logits = layout.parts(packed)
    q[:, :, 0] = rotate(gradients[0], x.cos, -x.sin)
    if layout.indexed:
        index[:, :, 0], index[:, :, 1] = rotate(gradients[10], x.cos, -x.sin), gradients[11]
    for number in range(layout.kv_sets):
        keys[:, :, number], values[:, :, number] = _set_gradients(x, number, gradients)
    if layout.gates:
        logits[:, :, 0] = torch.ops.aten.sigmoid_backward(gradients[1], gates)
    packed[..., sum(layout.columns) :] = 0
    return packed


def _set_gradients(
    x: RotaryPoolInputs, number: int, gradients: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradients of one set's keys and values: sums over the outputs built from them."""
    layout, (dk_cmp, dv_cmp) = x.read_layout(), gradients[2:4]
    d_rotated, d_keys, d_values = list[Tensor](), list[Tensor](), list[Tensor]()
    if layout.returns_set(number):
        dk, dv = gradients[4 + 2 * number : 6 + 2 * number]
        d_rotated.append(dk)
        d_values.append(dv)
    if number == 0 and layout.mean:
        d_rotated.append(_unpool(x, dk_cmp))
        d_values.append(_unpool(x, dv_cmp))
    if d_rotated:
        d_keys.append(rotate(reduce(torch.add, d_rotated), x.cos, -x.sin))
    if number == 0 and layout.pre_rope:
        d_keys.append(dk_cmp)
        d_values.append(dv_cmp)
    return reduce(torch.add, d_keys), reduce(torch.add, d_values)


torch_rotary_pool = register(
    "nsa::rotary_pool",
    RotaryPoolInputs,
    _forward,
    RotaryPoolInputs.empty_outputs,
    outputs=12,
    # Saved: gates. Of `packed`, the backward pass reads only shape and dtype.
    gradient=Gradient(_backward, inputs=1, outputs=12, saved=slice(1, 2), shape_only=1),
)
