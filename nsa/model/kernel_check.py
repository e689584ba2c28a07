"""Kernel check: a run's operations on this device, forward and backward, against PyTorch's.

    inputs    small, but longer than the window, with more blocks than a query selects, and with
              documents of one token and of uneven length if the run packs documents
    actual    the kernels in the run's dtype, twice: both must give the same bits
    usual     PyTorch in that dtype
    exact     PyTorch in float32 on the same inputs, or in float64 if the run is in float32

The error of `actual` may be TIMES that of `usual`, plus a rounding. Selected blocks are judged
by their importance, not by their index. Operations that `auto` runs in PyTorch by design, such as
those of very large heads, are left out. Not checked: decoding, attention without one of its
branches, and the teacher of train.teacher.
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

from nsa.constants import BRANCHES
from nsa.model.attention import Attention
from nsa.model.attention_metadata import AttentionMetadata, sample_queries
from nsa.model.config import ModelConfig
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
ROWS = 70  # of the operations without a sequence
VOCABULARY = 1_000  # of the loss and the embedding, at most

Outputs = Tensor | tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Operation:
    """One operation. Inputs are exact in bf16; floating-point ones get gradients."""

    name: str  # as nsa.ops.backend dispatches it
    inputs: tuple[Tensor | None, ...]
    run: Callable[..., Outputs]  # (*inputs, backend=...)


@dataclass(frozen=True)
class KernelResult:
    """Result of one operation's check."""

    operation: str
    problem: str  # empty: none
    error: float  # the largest of outputs and gradients, relative to their norm
    allowed: float
    seconds: float


def check_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, packed: bool, seq_len: int = 0
) -> list[KernelResult]:
    """Check each operation that a training run of `config` on `seq_len` tokens dispatches."""
    checked = (check(x, dtype) for x in operations(config, device, packed, seq_len))
    return [result for result in checked if result is not None]


def check(operation: Operation, dtype: torch.dtype) -> KernelResult | None:
    """Return None if the kernels do not support the operation."""
    start, error, allowed = time.perf_counter(), 0.0, math.inf
    try:
        actual, again = (_outputs(operation, dtype, "triton") for _ in range(2))
        exact_dtype = torch.float64 if dtype == torch.float32 else torch.float32
        usual, exact = (_outputs(operation, x, "blockwise") for x in (dtype, exact_dtype))
        problem = ""
        for a, b, u, e in zip(actual, again, usual, exact, strict=True):
            norm = e.norm().clamp(min=torch.finfo(torch.float32).tiny)
            wrong, limit = (float((x.to(e.dtype) - e).norm() / norm) for x in (a, u))
            roundings = 4 if dtype == torch.float32 else 1  # kernels split float32 in three
            limit = TIMES * limit + roundings * torch.finfo(dtype).eps
            if not wrong <= limit:
                problem = problem or f"its error is {wrong:.2g}, and {limit:.2g} is allowed"
            if not torch.equal(a, b):
                problem = problem or "two runs give different bits"
            if not wrong * allowed <= limit * error:  # the worst, relative to what is allowed
                error, allowed = wrong, limit
    except UnsupportedCall:
        return None
    except Exception as raised:  # whatever a compiler or a driver raises
        problem = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    return KernelResult(operation.name, problem, error, allowed, time.perf_counter() - start)


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
    draw = torch.Generator(device=outputs[0].device).manual_seed(1)
    trained = [x for x in outputs if x.requires_grad]
    seeds = [
        torch.randn(x.shape, generator=draw, device=x.device).bfloat16().to(x.dtype)
        for x in trained
    ]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    gradients = torch.autograd.grad(trained, leaves, seeds, allow_unused=True) if trained else ()
    return [x.detach() for x in (*outputs, *gradients) if x is not None and x.numel()]


def random_tensors(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape, exact in bf16."""
    draw = torch.Generator(device=device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=draw, device=device).bfloat16().float()


def operations(
    config: ModelConfig, device: torch.device, packed: bool, seq_len: int = 0
) -> Iterator[Operation]:
    """Yield the operations of the model's forward and backward pass."""
    random = random_tensors(device)
    width, size = config.width, min(config.vocab_size, VOCABULARY)
    tokens = (random(2, ROWS) * 100).long() % size  # some more than once
    x, delta, weight = random(2, ROWS, width), random(2, ROWS, width), random(width)
    norm = partial(add_rms_norm, eps=config.norm_eps)
    yield Operation("add_rms_norm", (x, delta, weight), norm)
    yield Operation("add_rms_norm", (x, None, weight), norm)
    yield Operation("swiglu", (random(2, ROWS, 2 * config.mlp_width),), swiglu)
    labels = tokens.flatten().masked_fill(torch.arange(2 * ROWS, device=device) % 7 == 0, -100)
    yield Operation("cross_entropy", (random(2 * ROWS, size), labels), _loss)
    yield from _attention(config, device, lengths(config, packed, seq_len), random)


def _loss(logits: Tensor, labels: Tensor, backend: str) -> tuple[Tensor, ...]:
    """The losses, and the gradient that overwrites the logits."""
    overwritten = logits.detach().clone()
    return cross_entropy_(overwritten, labels, True, backend=backend), overwritten


def lengths(config: ModelConfig, packed: bool, seq_len: int) -> list[int]:
    """Documents of the check, in tokens; long ones have kernels of their own."""
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

    columns = -(-sum(layer.layout.columns) // 8) * 8
    yield Operation("rotary_pool", (random(1, total, columns),), split)

    if config.attention.kind == "dense":
        return
    spec, heads, key, value = config.attention.spec, config.kv_heads, layer.key_dim, layer.value_dim
    if config.attention.compressor == "pool":
        pooled = [(key, metadata.block_rotary), (value, None)]
        for size, angles in pooled[:1] if layer.index is not None else pooled:
            learned = random(heads, size, size) / 8, random(heads, spec.block_len, size)
            block = random(1, total, heads, size), *learned, random(heads * size)
            by_block = {"block_tokens": tables[0], "token_blocks": tables[1]}
            yield Operation("pool", block, partial(pool, rotary=angles, **by_block))

    yield from _branches(config, metadata, layer, total, random)


def _branches(
    config: ModelConfig,
    metadata: AttentionMetadata,
    layer: Attention,
    total: int,
    random: Callable[..., Tensor],
) -> Iterator[Operation]:
    """The operations between the projections: selection, attention and the selector loss."""
    spec, heads, cu_seqlens = config.attention.spec, config.kv_heads, metadata.cu_seqlens
    key, value = layer.key_dim, layer.value_dim
    assert metadata.block_tokens is not None
    blocks = len(metadata.block_tokens)
    q, k_cmp = random(1, total, config.heads, key), random(1, blocks, heads, key)
    k, v = (random(1, total, heads, size) for size in (key, value))
    q_cmp = None if layer.index is None else random(1, total, heads, key)
    how: dict[str, Any] = {"spec": spec, "cu_seqlens": cu_seqlens}
    usual: dict[str, Any] = {**how, "backend": "blockwise"}
    fused: list[Tensor] = []  # the blocks that Triton selected

    def select(queries: Tensor, keys: Tensor, backend: str) -> Tensor:
        index = select_blocks(queries, keys, None, **how, backend=backend)
        return _scores(index, queries, keys, None, spec, cu_seqlens)

    def attend(q: Tensor, *x: Any, backend: str) -> tuple[Tensor, Tensor]:
        """Triton's fused operation, or PyTorch's branches on its blocks."""
        k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = x
        compressed, lse = compressed_attention(q, k_cmp, v_cmp, **usual)
        if backend == "triton":
            pairs = k_cmp, v_cmp, k_sel, v_sel, k_win, v_win
            inputs = GatedInputs(q, *pairs, gates, cu_seqlens, spec, q.shape[-1] ** -0.5)
            o, index = nsa_attention_and_blocks(inputs, backend)
            fused[:] = [index]
        else:
            index = select_blocks(q, k_cmp, lse, **usual)
            selected = selected_attention(q, k_sel, v_sel, fused[0], **usual)
            window = window_attention(
                q, k_win, v_win, spec.window, cu_seqlens=cu_seqlens, backend="blockwise"
            )
            o = (torch.stack((compressed, selected, window), -1) * gates[..., None, :]).sum(-1)
        return o, _scores(index, q, k_cmp, lse, spec, cu_seqlens)

    if q_cmp is not None:
        yield Operation("select_blocks", (q_cmp, k_cmp), select)
        index = select_blocks(q_cmp, k_cmp, None, **usual)
        run = partial(selected_attention, block_index=index, **how)
        yield Operation("selected_attention", (q, k, v), run)
    elif layer.branches == BRANCHES:
        v_cmp = random(1, blocks, heads, value)
        k_win, v_win = (random(*x.shape) for x in (k, v))
        gates = random(1, total, config.heads, 3).abs()
        yield Operation("nsa_attention", (q, k_cmp, v_cmp, k, v, k_win, v_win, gates), attend)
    if config.attention.selector_loss:
        queries = sample_queries(total, torch.zeros((), dtype=torch.long, device=q.device))

        def loss(q: Tensor, k_cmp: Tensor, k: Tensor, q_cmp: Any, backend: str) -> Outputs:
            return selector_loss(q, k_cmp, k, queries, q_cmp=q_cmp, **how, backend=backend)

        yield Operation("selector_loss", (q, k_cmp, k, q_cmp), loss)


@torch.no_grad()
def _scores(
    index: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    spec: NSASpec,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Return the importance of selected blocks, ascending [B, T, Hkv, n]; −1 where there is none.

    Of two nearly equal ones either may be selected.
    """
    total, scale, parts = q.shape[1], q.shape[-1] ** -0.5, []
    slices = document_slices(total, cu_seqlens), compressed_slices(total, cu_seqlens, spec)
    for doc, cmp in zip(*slices, strict=True):
        if doc.stop == doc.start:
            continue
        of_doc = None if lse is None else lse[:, doc]
        length = doc.stop - doc.start
        score = importance(q[:, doc], k_cmp[:, cmp], of_doc, spec, seq_len=length, scale=scale)
        padded = torch.nn.functional.pad(score, (0, 1), value=-1.0)  # read by index -1
        held = padded.gather(-1, index[:, doc].long() % padded.shape[-1])
        parts.append(held.masked_fill(held == -torch.inf, 0))
    return torch.cat(parts, 1).sort(-1).values


def problems_of(results: Sequence[Sequence[KernelResult]]) -> dict[str, str]:
    """Return each operation with a problem on any rank, and the first such rank's."""
    problems: dict[str, str] = {}
    for rank, of_rank in enumerate(results):
        for x in of_rank:
            if x.problem:
                problems.setdefault(x.operation, f"kernel check on rank {rank}: {x.problem}")
    return problems
