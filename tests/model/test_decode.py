"""Decoding with the KV cache against the parallel forward pass, and text generation."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.cache import KVCache, ring_indices
from nsa.model.decode import generate, prefill, sample, step
from nsa.spec import NSASpec
from tests.model.models import IMPORTED, NAMED, PER_TOKEN, SPEC, build, tiny, tokens
from tests.ops.cases import Calls

ODD = NSASpec(7, 3, 5, 4, 0, 2, 3)  # l, d, l' without common divisors; l > w
LENGTH = 44


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """Weights so large that attention is far from uniform, and every branch matters."""
    model = build(config, dtype)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def cut(ids: Tensor, lengths: list[int]) -> list[Tensor]:
    """The first tokens of each row."""
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]


def sparse(spec: NSASpec = SPEC, **changes: object) -> AttentionConfig:
    return AttentionConfig(spec=spec, **changes)


CONFIGS = {name: tiny(name) for name in NAMED}
CONFIGS |= {
    "dense, imported": tiny("dense", **IMPORTED),
    "index, imported": tiny("index", **IMPORTED),
    "index, a key per token": tiny(sparse(PER_TOKEN, branches="sel")),
    "index, odd": tiny(
        sparse(replace(ODD, window=512), branches="sel", compressor="pool"), heads=3, kv_heads=1
    ),
    "pool, imported": tiny("pool", **IMPORTED),
    "odd": tiny(sparse(ODD), heads=6, kv_heads=1, value_dim=None),
    "odd, mlp, G=1": tiny(sparse(ODD, compressor="mlp"), heads=2, kv_heads=2, value_dim=8),
    "odd, mlp, cmp+win": tiny(sparse(ODD, compressor="mlp", branches="cmp+win"), heads=8),
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_every_position_has_the_logits_of_the_parallel_pass(name: str) -> None:
    model, ids = model_of(CONFIGS[name]), tokens(LENGTH, batch=4)
    at_once = model(ids)
    lengths = torch.tensor([1, 3, 9, 20])
    rows = torch.arange(4)
    logits, cache = prefill(model, cut(ids, lengths.tolist()))
    for further in range(LENGTH - 20):
        now = lengths + further
        torch.testing.assert_close(logits, at_once[rows, now - 1], rtol=0, atol=1e-9)
        logits = step(model, ids[rows, now], cache)
    assert cache.lengths.tolist() == cache.host_lengths == (lengths + further + 1).tolist()


def test_the_cache_of_m7c_in_bytes_per_token() -> None:
    """A key and a value of 64 numbers, 2 heads, 12 layers, bf16; plus a compressed one per 16."""
    m7c = ModelConfig()
    token = 2 * (64 + 64) * 12 * 2

    def size(config: ModelConfig, capacity: int) -> int:
        sizes = {"device": "meta", "dtype": torch.bfloat16}
        return KVCache(config, 1, capacity=capacity, **sizes).nbytes

    assert size(m7c, 32_768) - size(m7c, 16_384) == 16_384 * token + 1_024 * token
    dense = replace(m7c, attention=AttentionConfig(kind="dense"))
    assert size(dense, 16_384) == 16_384 * token
    window = replace(m7c, attention=AttentionConfig(branches="win"))
    assert size(window, 16_384) == 512 * token


@pytest.mark.parametrize(
    ("reserve", "expected"),
    [({}, [10, 20, 40, 80]), ({"reserve": 55}, [60])],
    ids=["by doubling", "never, if reserved"],
)
@torch.no_grad()
def test_a_cache_grows(reserve: dict[str, int], expected: list[int]) -> None:
    model, ids = model_of(tiny()), tokens(60)
    logits, cache = prefill(model, ids[:, :5], **reserve)
    capacities = []
    for at in range(5, 60):
        logits = step(model, ids[:, at], cache)
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == expected
    torch.testing.assert_close(logits, model(ids)[:, -1])


def test_a_ring_keeps_the_newest_entries_and_writes_each_index_once() -> None:
    """On a GPU, the order of several writes to one index is undefined."""
    stored, row, index = ring_indices([9, 2, 20], 6, torch.device("cpu"))
    assert stored.tolist() == [*range(3, 9), 9, 10, *range(25, 31)]
    assert row.tolist() == [0] * 6 + [1] * 2 + [2] * 6
    assert index.tolist() == [3, 4, 5, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1]


@torch.no_grad()
def test_a_prompt_read_with_dense_attention_fills_the_cache_of_the_index() -> None:
    """In one layer, whose keys do not depend on the attention of an earlier one."""
    model, ids = model_of(tiny("index", layers=1)), tokens(LENGTH)
    logits = []
    for dense in (False, True):
        model.set_dense(dense)
        _, cache = prefill(model, ids[:, :-1])
        model.set_dense(False)
        logits.append(step(model, ids[:, -1], cache))
    assert torch.equal(*logits)


@torch.no_grad()
def test_selected_rows_of_a_cache_are_independent() -> None:
    """As beam search needs."""
    model, ids = model_of(tiny("mlp")), tokens(30, batch=3)
    _, cache = prefill(model, cut(ids, [20, 7, 12]))
    selected = cache.select([2, 0, 2])
    assert selected.host_lengths == selected.lengths.tolist() == [12, 20, 12]
    logits = step(model, torch.tensor([1, 2, 3]), selected)
    for row, (source, length, new) in enumerate([(2, 12, 1), (0, 20, 2), (2, 12, 3)]):
        sequence = torch.cat([ids[source, :length], torch.tensor([new])])
        torch.testing.assert_close(logits[row], model(sequence[None])[0, -1])
    assert cache.lengths.tolist() == [20, 7, 12]
    step(model, torch.tensor([1, 2, 3]), cache)  # its buffers are its own
    left = cache.select(torch.tensor([True, False, True]))  # e.g. tokens != stop
    assert left.host_lengths == left.lengths.tolist() == [21, 13]
    for nothing in ([], [[0]], torch.zeros(3, dtype=torch.bool), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"rows is .*; give the indices of one or more of"):
            cache.select(nothing)


def test_a_step_never_synchronizes_with_the_device() -> None:
    model, ids = model_of(tiny("mlp")), tokens(30, batch=2)
    with Calls() as mode:
        logits, cache = prefill(model, cut(ids, [8, 20]))
    products = [x.shape for op, _, x in mode.calls if "mm" in op.name() and x.shape[-1] == 61]
    assert products == [(2, 61)], "of the last tokens alone"
    compressed: list[int] = []
    for layer in model.sparse_layers().values():
        layer.compress.register_forward_hook(lambda *_: compressed.append(1))
    with Calls() as mode:
        for at in range(8):
            step(model, ids[:, at], cache)
    buffers = [buffer for layer in cache.layers for buffer in layer.buffers.values()]
    assert not any(x.requires_grad for x in (logits, *buffers)), "the graph grows with each step"
    assert not mode.host_syncs
    assert len(compressed) == 2 * 8 // SPEC.block_stride, "in steps that end a block, per layer"


def flops(config: ModelConfig, length: int) -> int:
    """FLOPs of one step that brings a sequence to `length` tokens."""
    model = LanguageModel(config)
    cache = KVCache(config, 1)
    cache.start([length - 1])
    with FlopCounterMode(display=False) as counter:
        step(model, torch.tensor([3]), cache)
    return counter.get_total_flops()


def test_the_cost_of_a_step_grows_by_the_compressed_blocks_only() -> None:
    """At ten times the context length; dense attention reads every key."""
    spec = NSASpec(8, 4, 16, 4, 1, 2, 24)
    config = tiny(sparse(spec))
    pair = 2 * config.heads * (config.head_dim + 5) * config.layers
    more = flops(config, 4_001) - flops(config, 401)
    assert more == pair * 3_600 // spec.block_stride
    dense = tiny("dense")
    assert flops(dense, 4_001) - flops(dense, 401) == pair * 3_600


def generated(model: LanguageModel, prompts: list[Tensor], **sampling: object) -> Tensor:
    return torch.stack(list(generate(model, prompts, **sampling)), 1)


def test_samples_depend_on_seed_and_prompt_and_not_on_the_batch() -> None:
    model, ids = model_of(tiny()), tokens(9, batch=3)
    sampling = {"max_new_tokens": 12, "top_p": 0.9}
    prompts = [ids[0], ids[1, :4], ids[2]]
    together = generated(model, prompts, **sampling, seed=1)
    for row, prompt in enumerate(prompts):
        assert torch.equal(generated(model, [prompt], **sampling, seed=1)[0], together[row])
    assert not torch.equal(generated(model, prompts, **sampling, seed=2), together)
    torch.nn.init.zeros_(model.norm.weight)  # all tokens are as likely after any prompt
    one, other, again = generated(model, [ids[0], ids[1], ids[0]], **sampling)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.6), (1.0, 0.8)])
def test_sampled_frequencies_are_the_probabilities(temperature: float, top_p: float) -> None:
    """Over evenly spaced random numbers; a nucleus is renormalized."""
    p = torch.tensor([0.2, 0.5, 0.0, 0.3], dtype=torch.float64)
    uniform = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    logits = p.log().expand(10_000, -1)
    frequency = sample(logits, uniform, temperature, top_p).bincount(minlength=4) / 10_000
    scaled = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
    allowed = {1.0: [0, 1, 3], 0.6: [1, 3], 0.8: [1, 3]}[top_p]
    expected = torch.zeros(4, dtype=torch.float64)
    expected[allowed] = scaled[allowed] / scaled[allowed].sum()
    torch.testing.assert_close(frequency.double(), expected, rtol=0, atol=2e-4)


def test_the_ends_of_a_probability_interval_belong_to_one_token_each() -> None:
    ends = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert sample(torch.zeros(3, 2), ends, 1.0, 1.0).tolist() == [0, 1, 1]


def test_the_lowest_temperature_and_top_p_are_greedy() -> None:
    model, ids = model_of(tiny()), tokens(9, batch=2)
    greedy = generated(model, list(ids), max_new_tokens=8, temperature=0)
    for sampling in (
        {"temperature": 1e-300},
        {"top_p": 1e-12},
        {"temperature": 0.9, "top_p": 1e-12},
    ):
        assert torch.equal(generated(model, list(ids), max_new_tokens=8, **sampling), greedy)


def test_generation_ends_at_the_stop_token_of_the_last_sequence() -> None:
    model, ids = model_of(tiny()), tokens(9, batch=2)
    passes: list[int] = []
    hook = model.embed.register_forward_hook(lambda *_: passes.append(1))
    free = generated(model, list(ids), max_new_tokens=12, seed=3)
    hook.remove()
    assert len(passes) == 12, "none after the last token"
    defaults = {"temperature": 1.0, "top_p": 1.0}
    assert torch.equal(free, generated(model, list(ids), max_new_tokens=12, seed=3, **defaults))
    stop = int(free[0, 4])
    assert stop not in free[0, :4]
    assert stop not in free[1, :7]
    unused = next(id for id in range(61) if id not in free)
    ended = generated(model, list(ids), max_new_tokens=12, seed=3, stop=[unused, stop])
    assert torch.equal(ended[0, :5], free[0, :5])
    assert ended[0, 5:].eq(-1).all()
    assert torch.equal(ended[1], free[1][: ended.shape[1]])
    alone = generated(model, [ids[0]], max_new_tokens=12, seed=3, stop=stop)
    assert alone.shape == (1, 5)
    torch.nn.init.zeros_(model.norm.weight)  # the first of equally likely tokens is 0
    assert generated(model, [ids[0]], max_new_tokens=3, temperature=0, stop=0).tolist() == [[0]]
    long = generate(model, [ids[0]], max_new_tokens=2**50, temperature=0)
    assert next(long).tolist() == [0], "a cache for all of them fits into no memory"


def test_invalid_inputs_are_refused_by_name() -> None:
    model, ids = model_of(tiny()), tokens(9, batch=2)
    empty = torch.tensor([], dtype=torch.int64)
    _, cache = prefill(model, ids)
    other, rotated = model_of(tiny("mlp")), model_of(tiny(rope_theta=5e5))
    for call, message in (
        (lambda: prefill(model, []), r"^prompts is empty; give one or more$"),
        (lambda: prefill(model, [ids[0], empty]), r"^prompts\[1\] is torch.int64 \(0,\); it must"),
        (
            lambda: prefill(model, ids + 60),
            r"^prompts contains \d+; ids are 0 to 60 with this vocabulary$",
        ),
        (lambda: prefill(model, ids - 99), r"^prompts contains -\d+; ids are 0 to 60"),
        (lambda: prefill(model, ids.float()), r"^prompts\[0\] is torch.float32"),
        (lambda: step(model, ids[:, 0] + 61, cache), r"^tokens contains \d+"),
        (
            lambda: step(model, ids[0], cache),
            r"^tokens is torch.int64 \(9,\); give one id for each",
        ),
        (lambda: step(model, torch.zeros(2, 23), cache), r"^tokens is torch.float32 \(2, 23\)"),
        (lambda: step(other, ids[:, 0], cache), r"^the cache is of another model"),
        (lambda: step(rotated, ids[:, 0], cache), r"^the cache is of another model"),
        (lambda: step(model.float(), ids[:, 0], cache), r"^the cache is of another model \(torch"),
        *(
            (partial(generated, model, [ids[0]], **{"max_new_tokens": 1} | wrong), message)
            for wrong, message in (
                ({"max_new_tokens": 0}, r"^max_new_tokens = 0: must be 1"),
                ({"top_p": 0.0}, r"^top_p = 0.0: must be above 0 and at most 1"),
                ({"top_p": 1.5}, r"^top_p = 1.5: must be above 0 and at most 1"),
                ({"temperature": -1.0}, r"^temperature = -1.0: must be 0 \(greedy\) or more"),
                ({"temperature": math.inf}, r"^temperature = inf: must be 0 \(greedy\) or more"),
                ({"temperature": math.nan}, r"^temperature = nan: must be 0 \(greedy\) or more"),
                ({"stop": 61}, r"^stop = 61: this model's"),
                ({"stop": [3, -1]}, r"^stop = \[3, -1\]: this model's"),
            )
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert cache.lengths.tolist() == [9, 9]  # a refused token is not counted
