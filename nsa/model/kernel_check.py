"""Kernel check: a run's operations on this device, forward and backward, against PyTorch's.

    inputs    small, but longer than the window, with more blocks than a query selects, and with
              documents of one token and of uneven length if the run packs documents
    actual    the kernels in the run's dtype, twice: both must give the same bits
    usual     PyTorch in that dtype
    exact     PyTorch in float32 on the same inputs, or in float64 if the run is in float32

The error of `actual` may be TIMES that of `usual`, plus a rounding. Selected blocks are judged
by their importance, not by their index. Operations that `auto` runs in PyTorch by design, such as
those of very large heads, are left out. `nsa doctor --kernels` checks decoding too. Not checked:
attention without one of its branches, and the teacher of train.teacher.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.model.attention import Attention
from nsa.model.attention_metadata import AttentionMetadata, sample_queries
from nsa.model.config import AttentionConfig, ModelConfig
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
from nsa.ops.activation import swiglu
from nsa.ops.backend import UnsupportedCall
from nsa.ops.cross_entropy import cross_entropy_
from nsa.ops.documents import compressed_slices, document_slices
from nsa.ops.embedding import tied_embedding
from nsa.ops.normalization import add_rms_norm
from nsa.ops.pooling import pool
from nsa.ops.reference import importance

TIMES = 4
ROWS = 70  # of the operations without a sequence
VOCABULARY = 1_000  # of the loss and the embedding, at most

Run = Callable[..., tuple[Tensor, ...]]  # (*inputs, backend=...) -> outputs


@dataclass(frozen=True)
class Operation:
    """One operation. Inputs are exact in bf16; floating-point ones get gradients."""

    name: str  # as nsa.ops.backend dispatches it
    inputs: tuple[Tensor, ...]
    run: Run
    check: Callable[[], str] | None = None  # a further problem, after `run`


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
    checked = (_check(x, dtype) for x in operations(config, device, packed, seq_len))
    return [result for result in checked if result is not None]


def _check(operation: Operation, dtype: torch.dtype) -> KernelResult | None:
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
        if operation.check is not None:
            problem = problem or operation.check()
    except UnsupportedCall:
        return None
    except Exception as raised:  # whatever a compiler or a driver raises
        problem = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    return KernelResult(operation.name, problem, error, allowed, time.perf_counter() - start)


def _outputs(operation: Operation, dtype: torch.dtype, backend: str) -> list[Tensor]:
    """Run on inputs rounded to `dtype`; return outputs and gradients."""
    inputs = [
        x.detach().clone().to(dtype).requires_grad_() if x.is_floating_point() else x
        for x in operation.inputs
    ]
    outputs = operation.run(*inputs, backend=backend)
    draw = torch.Generator(device=outputs[0].device).manual_seed(1)
    trained = [x for x in outputs if x.requires_grad]
    seeds = [
        torch.randn(x.shape, generator=draw, device=x.device).bfloat16().to(x.dtype)
        for x in trained
    ]
    leaves = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(trained, leaves, seeds, allow_unused=True) if trained else ()
    return [x.detach() for x in (*outputs, *gradients) if x is not None and x.numel()]


def operations(
    config: ModelConfig, device: torch.device, packed: bool, seq_len: int = 0
) -> Iterator[Operation]:
    """Yield the operations of the model's forward and backward pass."""
    draw = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).bfloat16().float()

    width, size = config.width, min(config.vocab_size, VOCABULARY)
    tokens = torch.randint(size, (2, ROWS), generator=draw, device=device)
    if config.tied_head:
        yield Operation("tied_embedding", (tokens, random(size, width)), _embed)
    norm = (random(2, ROWS, width), random(2, ROWS, width), random(width))
    eps = config.norm_eps

    def normed(x: Tensor, delta: Tensor, weight: Tensor, backend: str) -> tuple[Tensor, ...]:
        return add_rms_norm(x, delta, weight, eps, backend=backend)

    def first_normed(x: Tensor, weight: Tensor, backend: str) -> tuple[Tensor, ...]:
        return add_rms_norm(x, None, weight, eps, backend=backend)

    yield Operation("add_rms_norm", norm, normed)
    yield Operation("add_rms_norm", norm[::2], first_normed)
    gate_up = (random(2, ROWS, 2 * config.mlp_width),)
    yield Operation("swiglu", gate_up, lambda x, backend: (swiglu(x, backend=backend),))
    labels = tokens.flatten().masked_fill(torch.arange(2 * ROWS, device=device) % 7 == 0, -100)
    yield Operation("cross_entropy", (random(2 * ROWS, size), labels), _loss)
    yield from _attention(config, device, lengths(config, packed, seq_len), random)


def _embed(tokens: Tensor, weight: Tensor, backend: str) -> tuple[Tensor, ...]:
    return tied_embedding(tokens, weight, backend=backend)


def _loss(logits: Tensor, labels: Tensor, backend: str) -> tuple[Tensor, ...]:
    """The losses, and the gradient that overwrites the logits."""
    overwritten = logits.detach().clone()
    return cross_entropy_(overwritten, labels, True, backend=backend), overwritten


def lengths(config: ModelConfig, packed: bool, seq_len: int) -> list[int]:
    """Documents of the check, in tokens; long ones have kernels of their own."""
    from nsa.ops.triton.selected_op import DENSE_BLOCKS  # late: imports triton

    spec = config.attention.spec
    blocks = spec.select_top + 2
    if seq_len > DENSE_BLOCKS * spec.select_top * spec.select_len:
        blocks = DENSE_BLOCKS * spec.select_top + 2
    longest = max(spec.window, blocks * spec.select_len) + spec.block_stride + 3
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
    layout, spec = layer.layout, config.attention.spec
    rotary = metadata.rotary.cos, metadata.rotary.sin
    tables: Any = (metadata.block_tokens, metadata.token_blocks)

    def split(packed: Tensor, backend: str) -> tuple[Tensor, ...]:
        parts = rotary_pool(packed, layout, *rotary, *tables, backend=backend)
        pairs = [*parts.kv_sets, *([] if parts.compressed is None else [parts.compressed])]
        tensors = [parts.q, *(x for pair in pairs for x in pair)]
        return *tensors, *([] if parts.gates is None else [parts.gates])

    columns = -(-sum(layout.columns) // 8) * 8
    yield Operation("rotary_pool", (random(1, total, columns),), split)

    if config.attention.kind == "dense":
        return
    heads, key, value = config.kv_heads, layer.key_dim, layer.value_dim
    assert metadata.block_rotary is not None
    at_blocks = metadata.block_rotary.cos, metadata.block_rotary.sin
    if config.attention.compressor == "pool":
        for width, rotary_at in ((key, at_blocks), (value, None)):
            learned = random(heads, width, width) / 8, random(heads, spec.block_len, width)
            inputs = random(1, total, heads, width), *learned, random(heads * width)

            def pooled(
                x: Tensor,
                weight: Tensor,
                position: Tensor,
                scale: Tensor,
                backend: str,
                rotary_at: Any = rotary_at,
            ) -> tuple[Tensor, ...]:
                tensors = x, weight, position, scale
                return pool(*tensors, rotary_at, *tables, backend=backend)[:1]

            yield Operation("pool", inputs, pooled)

    blocks, options = tables[0].shape[0], dict[str, Any](cu_seqlens=cu_seqlens)
    q, gates = random(1, total, config.heads, key), random(1, total, config.heads, 3).abs()
    k_cmp, v_cmp = random(1, blocks, heads, key), random(1, blocks, heads, value)
    by_token = [random(1, total, heads, size) for size in (key, value, key, value)]
    if layer.branches == ("cmp", "sel", "win"):
        selected: list[Tensor] = []

        def attend(q: Tensor, *x: Tensor, backend: str) -> tuple[Tensor, ...]:
            """The fused operation, and the same branches with the blocks that it selected."""
            if backend == "triton":
                o, index = nsa_attention_and_blocks(
                    q, x[0], x[1], x[2], x[3], x[4], x[5], x[6], spec, backend=backend, **options
                )
                selected[:] = [index]
                return (o,)
            k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = x
            more: dict[str, Any] = options | {"backend": backend}
            outputs = (
                compressed_attention(q, k_cmp, v_cmp, spec, **more)[0],
                selected_attention(q, k_sel, v_sel, selected[0], spec, **more),
                window_attention(q, k_win, v_win, spec.window, **more),
            )
            weights = gates.unbind(-1)
            gated = [g[..., None] * o for g, o in zip(weights, outputs, strict=True)]
            return (torch.stack(gated).sum(0),)

        yield Operation(
            "nsa_attention",
            (q, k_cmp, v_cmp, *by_token, gates),
            attend,
            lambda: _worse_blocks(selected[0], q, k_cmp, config, cu_seqlens),
        )
    if config.attention.selector_loss:
        queries = sample_queries(total, torch.zeros((), dtype=torch.long, device=device))
        yield Operation(
            "selector_loss",
            (k_cmp, q, by_token[0]),
            lambda k, q, k_sel, backend: selector_loss(
                q, k, k_sel, queries, spec, backend=backend, **options
            ),
        )


def _worse_blocks(
    index: Tensor, q: Tensor, k_cmp: Tensor, config: ModelConfig, cu_seqlens: Tensor | None
) -> str:
    """Return a problem if the selected blocks have less importance than the best ones."""
    spec, scale, total = config.attention.spec, q.shape[-1] ** -0.5, q.shape[1]
    options = dict[str, Any](cu_seqlens=cu_seqlens, backend="blockwise")
    lse = compressed_attention(q, k_cmp, k_cmp, spec, **options)[1]
    best = select_blocks(q, k_cmp, lse, spec, **options)
    slices = document_slices(total, cu_seqlens), compressed_slices(total, cu_seqlens, spec)
    for doc, cmp in zip(*slices, strict=True):
        if doc.stop == doc.start:
            continue
        score = importance(
            q[:, doc], k_cmp[:, cmp], lse[:, doc], spec, seq_len=doc.stop - doc.start, scale=scale
        )
        padded = torch.nn.functional.pad(score, (0, 1))  # index -1 reads this 0
        held, wanted = (
            padded.gather(-1, x[:, doc].long() % padded.shape[-1]) for x in (index, best)
        )
        missing = (wanted.sum(-1) - held.sum(-1)).max() / wanted.sum(-1).max().clamp(min=1e-9)
        if not missing <= 1e-3 or (index[:, doc] < 0).sum() != (best[:, doc] < 0).sum():
            return f"it selects blocks that hold {float(missing):.1%} less attention than the best"
    return ""


def decoding(config: ModelConfig, device: torch.device) -> Operation:
    """Return the attention of a new token in a long sequence, and in one shorter than a block."""
    from nsa.ops import decode  # late: training does not decode

    draw = torch.Generator(device=device).manual_seed(0)
    spec, heads = config.attention.spec, config.kv_heads
    layer = meta_model(config).blocks[0].get_submodule("attention")
    assert isinstance(layer, Attention)
    longest = lengths(config, False, 0)[0]
    buffers = spec.compressed_len(longest), longest, min(spec.window, longest)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).bfloat16().float()

    tensors = [random(2, config.heads, layer.key_dim), random(2, config.heads, 3).abs()]
    tensors += [random(2, n, heads, d) for n in buffers for d in (layer.key_dim, layer.value_dim)]
    at = torch.tensor([longest, spec.block_len - 1], device=device)

    def attend(q: Tensor, gates: Tensor, *x: Tensor, backend: str) -> tuple[Tensor, ...]:
        with torch.no_grad():
            k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, lengths = x
            buffers = k_cmp, v_cmp, k_sel, v_sel, k_win, v_win
            return (decode.decode_attention(q, *buffers, gates, lengths, spec, backend=backend),)

    return Operation("decode_attention", (*tensors, at), attend)


def problems_of(results: Sequence[Sequence[KernelResult]]) -> dict[str, str]:
    """Return each operation with a problem on any rank, and the first such rank's."""
    return {
        result.operation: f"kernel check on rank {rank}: {result.problem}"
        for rank, of_rank in reversed([*enumerate(results)])
        for result in of_rank
        if result.problem
    }


def table(results: Sequence[KernelResult]) -> list[str]:
    """Return a line per operation."""
    form = "{:<16} {:>8} {:>8} {:>8}  {}"
    rows = [form.format("operation", "error", "allowed", "seconds", "")]
    for x in results:
        figures = f"{x.error:.1e}", f"{x.allowed:.1e}", f"{x.seconds:.1f}"
        rows.append(form.format(x.operation, *figures, x.problem or "ok"))
    return rows


def check_m7c() -> list[KernelResult]:
    """Check the kernels of M7C with each φ of its recipes, in bf16; nothing without a GPU."""
    if not torch.cuda.is_available():
        return []
    device = torch.device("cuda", torch.cuda.current_device())
    pool = ModelConfig(attention=AttentionConfig(compressor="pool", selector_loss=1.0))
    mean = ModelConfig(attention=AttentionConfig())
    decoded = _check(decoding(pool, device), torch.bfloat16)
    return [
        result
        for model, packed in ((pool, False), (pool, True), (mean, False))
        for result in check_kernels(model, torch.bfloat16, device, packed)
    ] + ([] if decoded is None else [decoded])


if __name__ == "__main__":  # where only torch and triton are installed
    checked = check_m7c()
    print(*table(checked), "" if checked else "no GPU here", sep="\n")
    sys.exit(bool(problems_of([checked])))
