"""Kernel check: a run's operations on this device, forward and backward, against PyTorch's.

    inputs    small, but longer than the window and than what a query selects; if the run packs
              documents, one has a single token and the others have uneven lengths
    actual    the kernels in the run's dtype, twice: both results must have the same bits
    usual     PyTorch in the run's dtype
    exact     PyTorch on the same inputs, in float32; in float64 if the run's dtype is float32

The error of `actual` may be at most TIMES the error of `usual`, plus a rounding (float32: four).
Selected blocks are compared by their importance, not by their index. An operation that its kernels
do not support, such as one with very large heads, is left out. Not checked: decoding, attention
without one of its branches, and the teacher of train.teacher.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nsa.constants import BRANCHES, IGNORE_INDEX
from nsa.model.attention import Attention
from nsa.model.attention_metadata import AttentionMetadata, sample_queries
from nsa.model.config import ModelConfig
from nsa.model.fused import PAD_TO
from nsa.model.language_model import meta_model
from nsa.ops import (
    compressed_attention,
    nsa_attention_and_blocks,
    rotary_pool,
    select_blocks,
    selected_attention,
    selector_loss,
    window_attention,
)
from nsa.ops.backend import UnsupportedCall
from nsa.ops.inputs import GatedInputs, compressed_slices, document_slices
from nsa.ops.per_token import add_rms_norm, cross_entropy_, swiglu
from nsa.ops.pooling import pool
from nsa.ops.reference import importance
from nsa.spec import NSASpec

TIMES = 4
ROWS = 70  # in each of two sequences, for operations on single tokens
VOCABULARY = 1_000  # logits of a token, at most

Outputs = Tensor | tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Operation:
    """One operation. Inputs are exact in bf16; floating-point ones get gradients."""

    name: str  # as nsa.ops.backend dispatches it
    inputs: tuple[Tensor | None, ...]
    run: Callable[..., Outputs]  # (*inputs, backend=...)


@dataclass(frozen=True)
class KernelResult:
    operation: str
    problem: str  # empty: none
    error: float  # relative, of the output or gradient whose error / allowed is largest
    allowed: float
    seconds: float


def check_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, packed: bool, seq_len: int = 0
) -> list[KernelResult]:
    """Check each operation that a training run of `config` on `seq_len` tokens dispatches."""
    checked = (check(x, dtype) for x in operations(config, device, packed, seq_len))
    return [result for result in checked if result is not None]


def check(operation: Operation, dtype: torch.dtype) -> KernelResult | None:
    """Check one operation; return None if its kernels do not support it."""
    start, error, allowed = time.perf_counter(), 0.0, math.inf
    largest = -1.0  # error / allowed
    try:
        actual, again = (_outputs(operation, dtype, "triton") for _ in range(2))
        exact_dtype = torch.float64 if dtype == torch.float32 else torch.float32
        usual, exact = (_outputs(operation, x, "blockwise") for x in (dtype, exact_dtype))
        # Kernels multiply float32 in three TF32 passes, which round more often than PyTorch.
        roundings = 4 if dtype == torch.float32 else 1
        problem = ""
        for result, repeated, in_pytorch, precise in zip(actual, again, usual, exact, strict=True):
            kernel_error = _relative_error(result, precise)
            limit = TIMES * _relative_error(in_pytorch, precise)
            limit += roundings * torch.finfo(dtype).eps
            if not kernel_error <= limit:  # a NaN is a problem
                problem = problem or f"its error is {kernel_error:.2g}, and {limit:.2g} is allowed"
            if not torch.equal(result, repeated):
                problem = problem or "two runs give different bits"
            ratio = kernel_error / limit
            if math.isnan(ratio):
                ratio = math.inf
            if ratio > largest:
                error, allowed, largest = kernel_error, limit, ratio
    except UnsupportedCall:
        return None
    except Exception as raised:  # whatever a compiler or a driver raises
        problem = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    return KernelResult(operation.name, problem, error, allowed, time.perf_counter() - start)


def _relative_error(x: Tensor, exact: Tensor) -> float:
    norm = exact.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return float((x.to(exact.dtype) - exact).norm() / norm)


def _outputs(operation: Operation, dtype: torch.dtype, backend: str) -> list[Tensor]:
    """Run on inputs rounded to `dtype`; return outputs and gradients."""
    inputs = [
        x.detach().clone().to(dtype).requires_grad_()
        if x is not None and x.is_floating_point()
        else x
        for x in operation.inputs
    ]
    results = operation.run(*inputs, backend=backend)
    results = results if isinstance(results, tuple) else (results,)
    outputs = [x for x in results if x is not None and x.numel()]
    differentiable = [x for x in outputs if x.requires_grad]
    random = random_tensors(outputs[0].device, seed=1)
    output_gradients = [random(*x.shape).to(x.dtype) for x in differentiable]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if differentiable:
        gradients = torch.autograd.grad(differentiable, leaves, output_gradients, allow_unused=True)
    return [x.detach() for x in (*outputs, *gradients) if x is not None and x.numel()]


def random_tensors(device: torch.device, seed: int = 0) -> Callable[..., Tensor]:
    """Return a function that draws a float32 tensor of a shape, with values exact in bf16."""
    draw = torch.Generator(device=device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=draw, device=device).bfloat16().float()


def operations(
    config: ModelConfig, device: torch.device, packed: bool, seq_len: int = 0
) -> Iterator[Operation]:
    """Yield the operations of the model's forward and backward pass."""
    random = random_tensors(device)
    width, size = config.width, min(config.vocab_size, VOCABULARY)
    labels = (random(2 * ROWS) * 100).long() % size
    labels[torch.arange(2 * ROWS, device=device) % 7 == 0] = IGNORE_INDEX
    x, delta, weight = random(2, ROWS, width), random(2, ROWS, width), random(width)
    norm = partial(add_rms_norm, eps=config.norm_eps)
    yield Operation("add_rms_norm", (x, delta, weight), norm)
    yield Operation("add_rms_norm", (x, None, weight), norm)
    yield Operation("swiglu", (random(2, ROWS, 2 * config.mlp_width),), swiglu)
    yield Operation("cross_entropy", (random(2 * ROWS, size), labels), _loss)
    yield from _attention(config, device, lengths(config, packed, seq_len), random)


def _loss(logits: Tensor, labels: Tensor, backend: str) -> tuple[Tensor, ...]:
    """Return the losses, and the gradient with which `cross_entropy_` overwrites the logits."""
    overwritten = logits.detach().clone()
    return cross_entropy_(overwritten, labels, True, backend=backend), overwritten


def lengths(config: ModelConfig, packed: bool, seq_len: int) -> list[int]:
    """Return the lengths of the check's documents; long ones have kernels of their own."""
    from nsa.ops.triton.selected import DENSE_BLOCKS  # late: imports triton

    spec = config.attention.spec
    blocks = spec.select_top + 2
    if seq_len > DENSE_BLOCKS * spec.select_top * spec.select_len:
        blocks = DENSE_BLOCKS * spec.select_top + 2
    window = 0 if config.attention.has_index else spec.window
    longest = max(window, blocks * spec.select_len) + spec.block_stride + 3
    return [1, longest, spec.block_len - 1, 2 * spec.select_len + 1] if packed else [longest]


def _attention(
    config: ModelConfig, device: torch.device, lengths: list[int], random: Callable[..., Tensor]
) -> Iterator[Operation]:
    documents, total = torch.tensor(lengths, device=device), sum(lengths)
    offsets = torch.nn.functional.pad(documents.cumsum(0), (1, 0)).int()
    cu_seqlens = offsets if len(lengths) > 1 else None
    metadata = AttentionMetadata.build(config, total, cu_seqlens, device)
    layer = meta_model(config).blocks[0].get_submodule("attention")
    assert isinstance(layer, Attention)
    tables: Any = (metadata.block_tokens, metadata.token_blocks)

    def split(packed: Tensor, backend: str) -> tuple[Tensor | None, ...]:
        parts = rotary_pool(packed, layer.layout, *metadata.rotary, *tables, backend=backend)
        others = chain(*parts.kv_sets, parts.compressed or (), parts.indexed or ())
        return parts.q, *others, parts.gates

    columns = -(-sum(layer.layout.columns) // PAD_TO) * PAD_TO
    yield Operation("rotary_pool", (random(1, total, columns),), split)
    if config.attention.kind == "dense":
        return
    spec, kv_heads = config.attention.spec, config.kv_heads
    if config.attention.compressor == "pool":
        pooled = [(layer.key_dim, metadata.block_rotary)]
        if layer.index is None:  # an index has no values
            pooled.append((layer.value_dim, None))
        for size, angles in pooled:
            x, weight = random(1, total, kv_heads, size), random(kv_heads, size, size) / 8
            position = random(kv_heads, spec.block_len, size)
            run = partial(pool, rotary=angles, block_tokens=tables[0], token_blocks=tables[1])
            yield Operation("pool", (x, weight, position, random(kv_heads * size)), run)
    yield from _branches(config, metadata, layer, total, random)


def _branches(
    config: ModelConfig,
    metadata: AttentionMetadata,
    layer: Attention,
    total: int,
    random: Callable[..., Tensor],
) -> Iterator[Operation]:
    """Yield the operations between the projections: selection, attention and selector loss."""
    spec, kv_heads, cu_seqlens = config.attention.spec, config.kv_heads, metadata.cu_seqlens
    key_dim, value_dim = layer.key_dim, layer.value_dim
    assert metadata.block_tokens is not None
    blocks = len(metadata.block_tokens)
    q, k_cmp = random(1, total, config.heads, key_dim), random(1, blocks, kv_heads, key_dim)
    k, v = (random(1, total, kv_heads, dim) for dim in (key_dim, value_dim))
    q_cmp = None if layer.index is None else random(1, total, kv_heads, key_dim)
    common: dict[str, Any] = {"spec": spec, "cu_seqlens": cu_seqlens}
    in_pytorch: dict[str, Any] = {**common, "backend": "blockwise"}
    triton_blocks: list[Tensor] = []  # selected by Triton, which runs first; PyTorch reads them

    def select(queries: Tensor, keys: Tensor, backend: str) -> Tensor:
        index = select_blocks(queries, keys, None, **common, backend=backend)
        return _selected_importance(index, queries, keys, None, spec, cu_seqlens)

    def attend(q: Tensor, *x: Any, backend: str) -> tuple[Tensor, Tensor]:
        """Return the gated sum, and the importance of the blocks that `backend` selects."""
        k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = x
        compressed, lse = compressed_attention(q, k_cmp, v_cmp, **in_pytorch)
        if backend == "triton":
            pairs = k_cmp, v_cmp, k_sel, v_sel, k_win, v_win
            inputs = GatedInputs(q, *pairs, gates, cu_seqlens, spec, q.shape[-1] ** -0.5)
            o, index = nsa_attention_and_blocks(inputs, backend)
            triton_blocks[:] = [index]
        else:
            index = select_blocks(q, k_cmp, lse, **in_pytorch)
            selected = selected_attention(q, k_sel, v_sel, triton_blocks[0], **in_pytorch)
            window = window_attention(
                q, k_win, v_win, spec.window, cu_seqlens=cu_seqlens, backend="blockwise"
            )
            o = (torch.stack((compressed, selected, window), -1) * gates[..., None, :]).sum(-1)
        return o, _selected_importance(index, q, k_cmp, lse, spec, cu_seqlens)

    if q_cmp is not None:
        yield Operation("select_blocks", (q_cmp, k_cmp), select)
        index = select_blocks(q_cmp, k_cmp, None, **in_pytorch)
        run = partial(selected_attention, block_index=index, **common)
        yield Operation("selected_attention", (q, k, v), run)
    elif layer.branches == BRANCHES:
        v_cmp = random(1, blocks, kv_heads, value_dim)
        k_win, v_win = (random(*x.shape) for x in (k, v))
        gates = random(1, total, config.heads, 3).abs()
        yield Operation("nsa_attention", (q, k_cmp, v_cmp, k, v, k_win, v_win, gates), attend)
    if config.attention.selector_loss:
        queries = sample_queries(total, offset=torch.tensor(0, device=q.device))

        def loss(q: Tensor, k_cmp: Tensor, k: Tensor, q_cmp: Any, backend: str) -> Outputs:
            return selector_loss(q, k_cmp, k, queries, q_cmp=q_cmp, **common, backend=backend)

        yield Operation("selector_loss", (q, k_cmp, k, q_cmp), loss)


@torch.no_grad()
def _selected_importance(
    index: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    spec: NSASpec,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Return the importance of the selected blocks, ascending [B, T, Hkv, n], padded with -1.

    Not their indices: of two blocks with nearly equal importance, either may be selected.
    """
    total, scale, parts = q.shape[1], q.shape[-1] ** -0.5, []
    slices = document_slices(total, cu_seqlens), compressed_slices(total, cu_seqlens, spec)
    for doc, cmp in zip(*slices, strict=True):
        if doc.stop == doc.start:
            continue
        doc_lse = None if lse is None else lse[:, doc]
        length = doc.stop - doc.start
        score = importance(q[:, doc], k_cmp[:, cmp], doc_lse, spec, seq_len=length, scale=scale)
        padded = torch.nn.functional.pad(score, (0, 1), value=-1.0)  # read by index -1
        selected = padded.gather(-1, index[:, doc].long() % padded.shape[-1])
        parts.append(selected.masked_fill(selected == -torch.inf, 0))  # -inf: it has no visible key
    return torch.cat(parts, 1).sort(-1).values


def problems_of(results: Sequence[Sequence[KernelResult]]) -> dict[str, str]:
    """Return the problem of each operation, from the lowest rank that has one."""
    problems: dict[str, str] = {}
    for rank, rank_results in enumerate(results):
        for result in rank_results:
            if result.problem:
                problem = f"kernel check on rank {rank}: {result.problem}"
                problems.setdefault(result.operation, problem)
    return problems
