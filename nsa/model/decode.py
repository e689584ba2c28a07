"""Decoding with a KV cache: a parallel prefill, then one step per token, and text generation.

A step computes what the parallel forward pass computes for the last position. Training does not
import this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.model.attention import Attention, NSAttention
from nsa.model.attention_metadata import AttentionMetadata, Rotary
from nsa.model.cache import Content, KVCache, LayerCache, Placement
from nsa.model.language_model import LanguageModel, check_tokens
from nsa.ops.decode import decode_attention
from nsa.ops.inputs import DecodeInputs
from nsa.ops.rotary import RotaryPooled

Prompts = Sequence[Tensor] | Tensor


@torch.no_grad()
def prefill(model: LanguageModel, prompts: Prompts, *, reserve: int = 0) -> tuple[Tensor, KVCache]:
    """Return the logits [B, V] after each prompt, and the cache to continue from.

    Prompts are 1-dim tensors of any lengths from 1 up, or rows of a tensor [B, T]. They are packed
    as documents, without padding. The cache has capacity for `reserve` more tokens.
    """
    states, cache = prefill_states(model, prompts, reserve=reserve)
    last = cache.lengths.cumsum(0) - 1  # [B]: each prompt's last token
    return F.linear(states[last], model.head_weight), cache


@torch.no_grad()
def prefill_states(
    model: LanguageModel, prompts: Prompts, *, reserve: int = 0
) -> tuple[Tensor, KVCache]:
    """Like `prefill`, but return the final hidden states [tokens of all prompts, width].

    Prompts may be embeddings [T, width] here.
    """
    rows = _check_prompts(model, prompts)
    counts = [len(row) for row in rows]
    config, device = model.config, model.embed.weight.device
    cu_seqlens = F.pad(torch.tensor(counts).cumsum(0), (1, 0)).to(device, torch.int32)
    metadata = AttentionMetadata.build(config, sum(counts), cu_seqlens, device)
    cache = KVCache(config, len(rows), dtype=model.embed.weight.dtype, device=device)
    attention = partial(_prefill_attention, cache.start(counts, reserve))
    return _run_blocks(model, torch.cat(rows), cache, metadata, attention), cache


@torch.no_grad()
def step(model: LanguageModel, tokens: Tensor, cache: KVCache) -> Tensor:
    """Append one token [B] to each sequence; return the logits [B, V] after it."""
    return F.linear(step_states(model, tokens, cache), model.head_weight)


@torch.no_grad()
def step_states(model: LanguageModel, tokens: Tensor, cache: KVCache) -> Tensor:
    """Like `step`, but return the final hidden states [B, width]; tokens may be embeddings here."""
    _check_step(model, cache, tokens)
    rotary = Rotary.at(cache.lengths, model.config)
    cache.advance()
    metadata = AttentionMetadata(cu_seqlens=None, rotary=rotary)
    return _run_blocks(model, tokens, cache, metadata, partial(_step_attention, cache))


def generate(
    model: LanguageModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each sequence, [B] on the model's device, until all have ended.

    A sequence ends after a token of `stop` and yields -1 from then on. Temperature 0 is greedy;
    `top_p` is nucleus sampling. A sequence's samples depend only on its prompt and `seed`, not on
    the rest of the batch.
    """
    rows = _check_prompts(model, prompts)
    check_sampling(max_new_tokens, temperature, top_p)
    stops = [stop] if isinstance(stop, int) else list(stop or [])
    if not all(0 <= id < model.config.vocab_size for id in stops):
        raise ValueError(f"stop = {stop}: this model's ids are 0 to {model.config.vocab_size - 1}")
    # The prompt is part of its sequence's seed, so that different prompts draw different numbers.
    draws = [random.Random(f"{seed} {row.tolist()}") for row in rows]

    def decode() -> Iterator[Tensor]:
        # No more than the longest prompt: the text may end early, and a full cache grows.
        reserve = min(max_new_tokens, max(len(row) for row in rows))
        logits, cache = prefill(model, rows, reserve=reserve)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=logits.device)
        for number in range(1, max_new_tokens + 1):
            if temperature == 0:
                tokens = logits.argmax(-1)
            else:
                uniform = torch.tensor([draw.random() for draw in draws], dtype=torch.float64)
                tokens = sample(logits, uniform.to(logits.device), temperature, top_p)
            yield torch.where(ended, -1, tokens)
            if stops:
                ended = ended | torch.isin(tokens, torch.tensor(stops, device=tokens.device))
                if bool(ended.all()):
                    return
            if number < max_new_tokens:
                logits = step(model, tokens, cache)

    return decode()  # an inner generator, so that invalid arguments raise before the first token


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Tensor:
    """Sample a token per row of logits [B, V] by inverse CDF, most likely tokens first.

    `uniform` [B] holds each row's random number in [0, 1).
    """
    shifted = logits.double() - logits.amax(-1, keepdim=True)  # no overflow at a low temperature
    p, order = (shifted / temperature).softmax(-1).sort(stable=True, dim=-1, descending=True)
    cdf = p.cumsum(-1)  # [B, V]
    # The nucleus ends with the token at which the sum reaches top_p.
    last = (F.pad(cdf[:, :-1], (1, 0)) < top_p).sum(-1, keepdim=True) - 1  # [B, 1]
    nucleus_p = cdf.gather(-1, last)
    index = torch.searchsorted(cdf, uniform[:, None] * nucleus_p, right=True)
    return order.gather(-1, torch.minimum(index, last))[:, 0]


def check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raise a ValueError for settings that cannot generate text."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must be 1 or more")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature}: must be 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p}: must be above 0 and at most 1")


def _run_blocks(
    model: LanguageModel,
    tokens: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    attention: Callable[[LayerCache, Attention, Tensor, AttentionMetadata], Tensor],
) -> Tensor:
    """Map tokens [T], or their embeddings [T, width], to final hidden states [T, width].

    Blocks and attention are called as modules, so forward hooks run here too.
    """
    embeddings = tokens if tokens.is_floating_point() else model.embed(tokens)
    x, delta = embeddings[None], None
    for block, layer_cache in zip(model.blocks, cache.layers, strict=True):
        x, delta = block(x, delta, metadata=metadata, cached=partial(attention, layer_cache))
    return model.final_norm(x, delta)[0]


def _prefill_attention(
    placement: Placement,
    layer_cache: LayerCache,
    layer: Attention,
    x: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    """Attend from all tokens of the prompts; store their keys and values in the cache."""
    parts = layer.rotary_pool(layer.project(x), metadata, all_sets=True)
    if layer.index is None:
        kv = layer.branch_kv(parts, metadata)
        compressed: Sequence[Tensor] = kv.get("cmp", ())
    else:  # branch_kv omits the index's keys while attention is dense, but the cache stores them
        assert parts.indexed is not None
        queries, token_keys = parts.indexed
        compressed = (layer.index.compress(token_keys, metadata),)
        kv = {"sel": parts.kv_sets[0], "index": (queries, *compressed)}
    layer_cache.fill(_token_entries(layer_cache, layer, parts), placement)
    layer_cache.fill(_block_entries(layer_cache, compressed), placement)
    return layer.o(layer.attend(parts.q, parts.gates, kv, metadata).flatten(-2))


def _step_attention(
    cache: KVCache,
    layer_cache: LayerCache,
    layer: Attention,
    x: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    """Store the keys and values of each sequence's newest token, then attend from it."""
    lengths = cache.lengths
    parts = layer.rotary_pool(layer.project(x), metadata, all_sets=True)
    layer_cache.append(_token_entries(layer_cache, layer, parts), lengths - 1)
    if not isinstance(layer, NSAttention):
        return layer.o(_dense_attention(parts.q[0], layer_cache, cache).flatten(-2))[None]
    if "k_cmp" in layer_cache.plan and cache.completes_a_block:
        _append_blocks(layer_cache, layer, lengths, metadata)
    blocks = layer.spec.compressed_len(cache.longest)
    inputs = DecodeInputs(
        q=parts.q[0],
        q_cmp=None if parts.indexed is None else parts.indexed[0][0],
        k_cmp=layer_cache.read("k_cmp", blocks),
        v_cmp=layer_cache.read("v_cmp", blocks),
        k_sel=layer_cache.read("k_sel"),
        v_sel=layer_cache.read("v_sel"),
        k_win=layer_cache.read("k_win"),
        v_win=layer_cache.read("v_win"),
        gates=None if parts.gates is None else parts.gates[0],
        lengths=lengths,
        spec=layer.spec,
        branches="+".join(layer.branches),
        scale=layer.key_dim**-0.5,
    )
    return layer.o(decode_attention(inputs, layer.backend).flatten(-2))[None]


def _token_entries(layer_cache: LayerCache, layer: Attention, parts: RotaryPooled) -> Content:
    """Return the keys or values to store in each buffer that has one entry per token."""
    content = {}
    for name, buffer in layer_cache.plan.items():
        if buffer.entries == "tokens":
            keys, values = parts.kv_sets[layer.branches.index(buffer.branch)]
            content[name] = keys if buffer.kind == "k" else values
        elif buffer.entries == "pre_rope":
            if parts.indexed is not None:
                content[name] = parts.indexed[1]
            elif parts.compressed is not None:
                content[name] = parts.compressed[0]
    return content


def _block_entries(layer_cache: LayerCache, compressed: Sequence[Tensor]) -> Content:
    """Return compressed keys, and compressed values if the layer has a buffer for them."""
    pairs = zip(("k_cmp", "v_cmp"), compressed, strict=False)  # an index compresses only keys
    return {name: x for name, x in pairs if name in layer_cache.plan}


def _append_blocks(
    layer_cache: LayerCache, layer: NSAttention, lengths: Tensor, metadata: AttentionMetadata
) -> None:
    """Compress and store the block that ends with a sequence's newest token, if there is one."""
    block_len, stride = layer.spec.block_len, layer.spec.block_stride
    # The last `block_len` tokens of each sequence form one block; the sequences lie side by side.
    token = torch.arange(len(lengths) * block_len, device=lengths.device)
    metadata = replace(
        metadata,
        block_tokens=token.view(-1, block_len),
        token_blocks=token[:, None] // block_len,
        block_rotary=metadata.rotary,  # a block has the position of its last token, the newest
    )
    k = layer_cache.last("k", lengths, block_len).flatten(0, 1)[None]  # [1, B · l, Hkv, Dk]
    if layer.index is not None:
        compressed: Sequence[Tensor] = (layer.index.compress(k, metadata),)
    else:
        v = layer_cache.last("v", lengths, block_len).flatten(0, 1)[None]
        if layer.compress is not None:
            compressed = layer.compress(k, v, metadata)
        else:  # the mean, of rotated keys
            compressed = [x.unflatten(1, (-1, block_len)).mean(2) for x in (k, v)]
    start = lengths - block_len
    block = torch.div(start, stride, rounding_mode="floor")
    is_block = (start >= 0) & (start % stride == 0)
    layer_cache.append(_block_entries(layer_cache, compressed), block, valid=is_block)


def _dense_attention(q: Tensor, layer_cache: LayerCache, cache: KVCache) -> Tensor:
    """Return the attention [B, Hq, Dv] of one token [B, Hq, Dk] over all tokens of its sequence."""
    k, v = (layer_cache.buffers[name][:, : cache.longest] for name in ("k_all", "v_all"))
    mask = None  # the fastest kernels take no mask
    if min(cache.host_lengths) < cache.longest:
        mask = torch.arange(cache.longest, device=cache.device) < cache.lengths[:, None]
        mask = mask[:, None, None]
    # The query heads of a KV head become its queries, so that its keys are not repeated.
    q_BKGD = q.unflatten(1, (k.shape[2], -1))
    o = F.scaled_dot_product_attention(q_BKGD, k.transpose(1, 2), v.transpose(1, 2), mask)
    return o.flatten(1, 2)


def _check_prompts(model: LanguageModel, prompts: Prompts) -> list[Tensor]:
    """Return the prompts on the model's device, or raise a ValueError."""
    if len(prompts) == 0:
        raise ValueError("prompts is empty; give one or more")
    rows = [prompt.to(model.embed.weight.device) for prompt in prompts]
    if all(row.dim() == 2 and row.is_floating_point() and len(row) for row in rows):
        return rows  # embeddings
    for number, row in enumerate(rows):
        if row.dim() != 1 or len(row) == 0 or row.is_floating_point():
            raise ValueError(
                f"prompts[{number}] is {row.dtype} {tuple(row.shape)}; it must be ids [T], T >= 1"
            )
    check_tokens(torch.cat(rows).cpu(), model.config.vocab_size, "prompts")
    return rows


def _check_step(model: LanguageModel, cache: KVCache, tokens: Tensor) -> None:
    embedded = tokens.is_floating_point()
    expected = (cache.batch, model.config.width) if embedded else (cache.batch,)
    if tokens.shape != expected:
        raise ValueError(
            f"tokens is {tokens.dtype} {tuple(tokens.shape)}; give one id for each of the "
            f"{cache.batch} cached sequences"
        )
    weight = model.embed.weight
    if cache.config != model.config or (cache.dtype, cache.device) != (weight.dtype, weight.device):
        raise ValueError(
            f"the cache is of another model ({cache.dtype} on {cache.device}; this model is "
            f"{weight.dtype} on {weight.device}); create one with prefill"
        )
    if not embedded:
        check_tokens(tokens, model.config.vocab_size, "tokens")
