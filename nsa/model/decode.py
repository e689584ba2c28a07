"""Tokens one after the other: a prompt by the parallel forward pass, then a step for each token.

Training uses nothing of this. What a step computes is what the parallel forward pass computes for
the last position, from what the cache keeps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.model.attention import DenseAttention, NSAttention
from nsa.model.cache import KVCache, LayerCache, Places
from nsa.model.language_model import LanguageModel
from nsa.model.layout import Layout, Rotary
from nsa.ops.decode import decode_attention

Attention = NSAttention | DenseAttention
AttendWith = Callable[[LayerCache, Attention, Tensor, Layout], Tensor]


@torch.no_grad()
def prefill(
    model: LanguageModel,
    prompts: Sequence[Tensor] | Tensor,
    lengths: Sequence[int] | Tensor | None = None,
    *,
    room: int = 0,
) -> tuple[Tensor, KVCache]:
    """The logits [B, V] after each prompt, and the cache to go on from.

    Prompts are 1-dim and of any length from 1 up; or they are the rows of one tensor [B, T], of
    which the first `lengths` tokens count. They are packed as documents, and nothing is padded.
    The cache has `room` for so many tokens more before it has to grow.
    """
    states, cache = prefill_states(model, prompts, lengths, room=room)
    return _head(model, states[cache.lengths.cumsum(0) - 1]), cache


@torch.no_grad()
def prefill_states(
    model: LanguageModel,
    prompts: Sequence[Tensor] | Tensor,
    lengths: Sequence[int] | Tensor | None = None,
    *,
    room: int = 0,
) -> tuple[Tensor, KVCache]:
    """As `prefill`, but what the head reads of every token: [tokens of all prompts, width]."""
    rows = _rows(model, prompts, lengths)
    counts = [len(row) for row in rows]
    ends = torch.tensor(counts).cumsum(0)
    config, device = model.config, model.embed.weight.device
    layout = Layout.of(
        sum(counts),
        F.pad(ends, (1, 0)).to(device, torch.int32),
        config.attention.spec if config.attention.kind == "nsa" else None,
        config.head_dim,
        config.rope_theta,
        device,
    )
    cache = KVCache(config, len(rows), dtype=model.embed.weight.dtype, device=device)
    where = cache.start(counts, room)
    attend = partial(_attend_and_keep, where)
    return _through(model, torch.cat(rows), cache, layout, attend), cache


@torch.no_grad()
def step(model: LanguageModel, tokens: Tensor, cache: KVCache) -> Tensor:
    """The logits [B, V] after one token more of each sequence, which the cache takes in."""
    return _head(model, step_states(model, tokens, cache))


@torch.no_grad()
def step_states(model: LanguageModel, tokens: Tensor, cache: KVCache) -> Tensor:
    """As `step`, but what the head reads: [B, width]."""
    _check_cache(model, cache, tokens)
    config = model.config
    position = cache.lengths.clone()
    cache.advance()
    layout = Layout(None, Rotary.at(position, config.head_dim, config.rope_theta), None, None)
    return _through(model, tokens, cache, layout, partial(_attend_one, cache))


@torch.no_grad()
def extend(model: LanguageModel, tokens: Tensor, cache: KVCache) -> Tensor:
    """The logits [B, T, V] after each of several tokens [B, T] more, one step after the other."""
    return _head(model, extend_states(model, tokens, cache))


@torch.no_grad()
def extend_states(model: LanguageModel, tokens: Tensor, cache: KVCache) -> Tensor:
    """As `extend`, but what the head reads: [B, T, width]."""
    return torch.stack([step_states(model, column, cache) for column in tokens.unbind(1)], 1)


def generate(
    model: LanguageModel,
    prompts: Sequence[Tensor] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop: int | None = None,
) -> Iterator[Tensor]:
    """The next token of each sequence, [B] on the model's device, again and again.

    A sequence ends after `stop`; from then on its token is -1, and once all have ended there are no
    more. Temperature 0 takes the likeliest token, and top_p below 1 draws from the fewest that
    have that probability together. What a sequence draws depends on its `seed` (one for all, or one
    each) and its prompt, and on nothing that is beside it in the batch.
    """
    rows = _rows(model, prompts, None)
    check_sampling(max_new_tokens, temperature, top_p)
    if stop is not None and not 0 <= stop < model.config.vocab_size:
        raise ValueError(f"stop = {stop}: this model's ids are 0 to {model.config.vocab_size - 1}")
    seeds = [seed] * len(rows) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(rows):
        raise ValueError(f"seed has {len(seeds)} entries for {len(rows)} prompts")
    return _generate(model, rows, seeds, max_new_tokens, temperature, top_p, stop)


def _generate(
    model: LanguageModel,
    rows: list[Tensor],
    seeds: list[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    stop: int | None,
) -> Iterator[Tensor]:
    # By its text, so that two prompts of a batch do not draw alike.
    draws = [random.Random(f"{seed} {row.tolist()}") for seed, row in zip(seeds, rows, strict=True)]
    # No more than growing would take, and none of it where few tokens are asked for.
    room = min(max_new_tokens, max(len(row) for row in rows))
    logits, cache = prefill(model, rows, room=room)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=logits.device)
    for left in range(max_new_tokens, 0, -1):
        if temperature == 0:
            tokens = logits.argmax(-1)
        else:
            uniform = torch.tensor([draw.random() for draw in draws], dtype=torch.float64)
            tokens = sample(logits, uniform.to(logits.device), temperature, top_p)
        yield torch.where(ended, -1, tokens)
        if stop is not None:
            ended = ended | (tokens == stop)
            if bool(ended.all()):
                return
        if left > 1:
            logits = step(model, tokens, cache)


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Tensor:
    """A token for each row of logits [B, V]: where its number in [0, 1) falls, likeliest first."""
    ahead = logits.double() - logits.amax(-1, keepdim=True)  # else a low temperature overflows
    p, order = (ahead / temperature).softmax(-1).sort(stable=True, dim=-1, descending=True)
    reached = p.cumsum(-1)
    # The token that reaches top_p is the last.
    allowed = (F.pad(reached[:, :-1], (1, 0)) < top_p).sum(-1, keepdim=True)
    total = reached.gather(-1, allowed - 1)
    drawn = torch.searchsorted(reached, uniform[:, None] * total, right=True)
    return order.gather(-1, torch.minimum(drawn, allowed - 1))[:, 0]


def check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Refuse what no text can be drawn with."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must be 1 or more")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature}: must be 0 (the likeliest token) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p}: must be above 0 and at most 1")


def _through(
    model: LanguageModel, tokens: Tensor, cache: KVCache, layout: Layout, attend: AttendWith
) -> Tensor:
    """A row of tokens, each at its position in `layout`, [T] to what the head reads [T, width].

    Blocks and their attention are called as in training: what was hung on them counts here too.
    """
    x = model.embed(tokens)[None]
    for block, kept in zip(model.blocks, cache.layers, strict=True):
        x = block(x, layout=layout, attend=partial(attend, kept))
    return model.norm(x)[0]


def _head(model: LanguageModel, states: Tensor) -> Tensor:
    return F.linear(states, model.embed.weight)


def _attend_and_keep(
    where: Places, kept: LayerCache, layer: Attention, x: Tensor, layout: Layout
) -> Tensor:
    """The parallel forward pass of a layer, of which the cache keeps keys and values."""
    if isinstance(layer, DenseAttention):
        q, k, v = layer.project(x, layout)
        kept.fill({"k of all": k, "v of all": v}, where)
        o = layer.attend(q, k, v, layout)
    else:
        q, gates, keys, values = layer.project(x, layout)
        pairs = layer.attended_to(keys, values, layout)
        kept.fill(_tokens(kept, keys, values, layout.rotary), where)
        kept.fill(dict(zip(kept.plan.blocks, pairs.get("cmp", ()), strict=False)), where)
        o = layer.attend(q, gates, pairs, layout)
    return layer.o(o.flatten(-2))


def _attend_one(
    cache: KVCache, kept: LayerCache, layer: Attention, x: Tensor, layout: Layout
) -> Tensor:
    """A layer's output for the newest token of each sequence, which the cache takes in first."""
    lengths = cache.lengths
    if isinstance(layer, DenseAttention):
        q, k, v = layer.project(x, layout)
        kept.append({"k of all": k[0], "v of all": v[0]}, lengths - 1)
        o = _dense(q[0], kept, cache)
    else:
        q, gates, keys, values = layer.project(x, layout)
        new = _tokens(kept, keys, values, layout.rotary)
        kept.append({name: x[0] for name, x in new.items()}, lengths - 1)
        spec = layer.spec
        if kept.plan.blocks and cache.completes_a_block:
            _compress(layer, kept, lengths, layout.rotary)
        complete = spec.compressed_len(cache.longest)
        k_cmp, v_cmp = (
            None if x is None else x[:, :complete] for x in map(kept.read, ("k_cmp", "v_cmp"))
        )
        o = decode_attention(
            q[0],
            k_cmp,
            v_cmp,
            kept.read("k_sel"),
            kept.read("v_sel"),
            kept.read("k_win"),
            kept.read("v_win"),
            gates[0],
            lengths,
            spec,
            branches=layer.branches,
            backend=layer.backend,
        )
    return layer.o(o.flatten(-2))[None]


def _tokens(
    kept: LayerCache, keys: dict[str, Tensor], values: dict[str, Tensor], rotary: Rotary
) -> dict[str, Tensor]:
    """What goes into the buffers that have an entry for each token."""
    content = {}
    for name, stream in kept.plan.streams.items():
        if stream.kind == "v":
            content[name] = values[stream.branch]
        else:
            key = keys[stream.branch]
            content[name] = rotary.turn(key) if stream.turned else key
    return content


def _compress(layer: NSAttention, kept: LayerCache, lengths: Tensor, rotary: Rotary) -> None:
    """Append the block that ends with the newest token, to sequences where one does."""
    length, stride = layer.spec.block_len, layer.spec.block_stride
    k, v = (kept.last(kind, lengths, length)[None] for kind in "kv")
    new = layer.compress.of_blocks(k, v, rotary)
    past = lengths - length
    due = (past >= 0) & (past % stride == 0)
    block = torch.div(past, stride, rounding_mode="floor")
    content = {name: x[0] for name, x in zip(kept.plan.blocks, new, strict=False)}
    kept.complete(content, block, due)


def _dense(q: Tensor, kept: LayerCache, cache: KVCache) -> Tensor:
    """Plain attention of one token [B, Hq, Dk] over all tokens of its sequence: [B, Hq, Dv]."""
    k, v = (kept.buffers[name][:, : cache.longest] for name in ("k of all", "v of all"))
    seen = None  # the fastest kernels take no mask
    if min(cache.host_lengths) < cache.longest:
        seen = torch.arange(cache.longest, device=cache.device) < cache.lengths[:, None]
        seen = seen[:, None, None]
    # A group's heads are the rows of one query, so that no key is repeated for each of them.
    q_BKGD = q.unflatten(1, (k.shape[2], -1))
    o = F.scaled_dot_product_attention(q_BKGD, k.transpose(1, 2), v.transpose(1, 2), seen)
    return o.flatten(1, 2)


def _rows(
    model: LanguageModel,
    prompts: Sequence[Tensor] | Tensor,
    lengths: Sequence[int] | Tensor | None,
) -> list[Tensor]:
    """The tokens of each prompt, on the model's device; what cannot be a prompt is refused."""
    if model.sequence is not None:
        raise ValueError("this model has a part of each sequence; decode with one that has all")
    if lengths is not None:
        counts = [int(length) for length in lengths]
        if len(counts) != len(prompts):
            raise ValueError(f"lengths has {len(counts)} entries for {len(prompts)} prompts")
        for number, count in enumerate(counts):
            if count > len(prompts[number]):
                raise ValueError(
                    f"lengths[{number}] = {count}: the prompt has {len(prompts[number])} tokens"
                )
        prompts = [prompt[:count] for prompt, count in zip(prompts, counts, strict=True)]
    if len(prompts) == 0:
        raise ValueError("prompts has none; give one or more")
    rows = [prompt.to(model.embed.weight.device) for prompt in prompts]
    for number, row in enumerate(rows):
        if row.dim() != 1 or len(row) == 0 or row.is_floating_point():
            raise ValueError(
                f"prompts[{number}] is {row.dtype} {tuple(row.shape)}; it must be ids [T], with "
                "one or more of them"
            )
    _check_ids(model, torch.cat(rows), "prompts")
    return rows


def _check_ids(model: LanguageModel, ids: Tensor, name: str) -> None:
    vocabulary = model.config.vocab_size
    least, most = (int(end) for end in ids.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise ValueError(f"{name} has the id {wrong}; this model's are 0 to {vocabulary - 1}")


def _check_cache(model: LanguageModel, cache: KVCache, tokens: Tensor) -> None:
    if tokens.shape != (cache.batch,) or tokens.is_floating_point():
        raise ValueError(
            f"tokens is {tokens.dtype} {tuple(tokens.shape)}; the cache has {cache.batch} "
            "sequences, and each takes one id"
        )
    weight = model.embed.weight
    if cache.config != model.config or (cache.dtype, cache.device) != (weight.dtype, weight.device):
        raise ValueError(
            f"the cache is of another model ({cache.dtype} on {cache.device}, this one "
            f"{weight.dtype} on {weight.device}); make one with prefill"
        )
    if tokens.device.type == "cpu":  # elsewhere looking at them would wait for the device
        _check_ids(model, tokens, "tokens")
