"""Indexed batches: computed from the position in the order alone."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.batches import Batch, Mixer, Samples, shuffled_index
from tests.data.texts import MemoryStore

EOS = 257


def counting(samples: int, seq_len: int = 4, seed: int = 3) -> Samples:
    """Samples of 0, 1, 2, …, of which the first token identifies each."""
    tokens = np.arange(samples * seq_len + 1)
    return Samples([MemoryStore(tokens)], seq_len=seq_len, seed=seed)


def samples_of(
    samples: Samples, consumed: int = 0, *, world_size: int = 1, micro_batch: int = 1, **more: int
) -> list[int]:
    """The samples of a step: of all ranks in micro-step 0, in micro-step 1, …"""
    shape = {"world_size": world_size, "micro_batch": micro_batch, **more}
    ranks = [samples.step(consumed, rank=rank, **shape) for rank in range(world_size)]
    batches = [batch for micro_step in zip(*ranks, strict=True) for batch in micro_step]
    firsts = torch.cat([batch.input_ids[:, 0] for batch in batches])
    return (firsts // samples.seq_len).tolist()


def packed(tokens: list[int], seq_len: int, micro_batch: int = 1) -> Batch:
    """The first packed batch of `tokens`."""
    store = MemoryStore(np.array(tokens, dtype=np.uint16), EOS)
    return Samples([store], seq_len=seq_len, seed=0, packing="documents").batch(range(micro_batch))


@settings(deadline=None)
@given(samples=st.integers(1, 40), seed=st.integers(0, 2**64))
def test_each_epoch_uses_every_sample_exactly_once(samples: int, seed: int) -> None:
    consumed = samples_of(counting(samples, seed=seed), micro_batch=3 * samples)
    for epoch in range(3):
        assert sorted(consumed[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_the_order_continues_if_ranks_micro_batch_or_accumulation_change(
    data: st.DataObject,
) -> None:
    """Consecutive runs of different shapes read what one run would have read."""
    number = st.integers(1, 4)
    consumed: list[int] = []
    while len(consumed) < 60:
        names = ("micro_batch", "accumulation", "world_size")
        shape = {name: data.draw(number, label=name) for name in names}
        for _ in range(data.draw(number, label="steps")):
            consumed += samples_of(counting(23), len(consumed), **shape)
    assert consumed == samples_of(counting(23), micro_batch=len(consumed))


def test_the_order_is_that_of_earlier_versions() -> None:
    """A run resumes by a position in it, so nothing may change: seed, epoch, source, sample."""
    stores = [MemoryStore(np.arange(start, start + 21), name=str(start)) for start in (0, 100)]
    samples = Samples(stores, fractions=[0.5, 0.5], seq_len=2, seed=1337)
    firsts = samples.batch(range(40)).input_ids[:, 0]
    order = [(int(first) // 100, int(first) % 100 // 2) for first in firsts]
    assert [source for source, _ in order] == [1, 0] * 20
    of_source = [[number for source, number in order if source == which] for which in (0, 1)]
    assert of_source[0] == [5, 2, 8, 0, 9, 7, 4, 1, 3, 6, 9, 3, 1, 0, 8, 6, 5, 4, 7, 2]
    assert of_source[1] == [5, 2, 6, 3, 8, 7, 1, 4, 0, 9, 3, 7, 6, 1, 9, 0, 5, 8, 4, 2]
    assert samples.fingerprint == "7f6198a0a0a464ae"
    growing = MemoryStore(np.arange(41))  # shuffled in blocks
    growing.grows = True
    samples = Samples([stores[0], growing], fractions=[0.5, 0.5], seq_len=2, seed=1337)
    located = [samples.locate(position) for position in range(80)]
    order = [first // 2 for store, first in located if store is growing]
    assert order[:20] == [11, 13, 7, 2, 12, 5, 3, 8, 0, 10, 14, 6, 4, 1, 9, 15, 17, 19, 18, 16]
    assert order[20:] == [14, 5, 4, 7, 6, 13, 15, 12, 3, 9, 11, 1, 0, 10, 8, 2, 18, 16, 19, 17]


def test_a_mixture_reports_where_it_first_repeats_and_its_mean_bytes_per_token() -> None:
    stores = [MemoryStore(np.arange(41), -1, 4.0, "a"), MemoryStore(np.arange(13), -1, 2.0, "b")]
    samples = Samples(stores, fractions=[0.75, 0.25], seq_len=4, seed=0)
    assert samples.bytes_per_token == 0.75 * 4 + 0.25 * 2
    order = [samples.locate(position)[0].name for position in range(20)]
    assert order.count("b") == 5
    last = [at for at, name in enumerate(order) if name == "b"][3]  # "b" has three samples
    assert samples.available(last) == (last, None)
    assert samples.available(last + 1) == (last, "b")


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_labels_are_the_next_tokens_and_share_no_memory_with_the_inputs(packing: str) -> None:
    store = counting(6, seq_len=5).stores[0]
    batch = Samples([store], seq_len=5, seed=0, packing=packing).batch([0])
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.shape == batch.labels.shape == (1, 5)
    assert torch.equal(batch.labels, batch.input_ids + 1)
    batch.labels.fill_(-100)
    assert (batch.input_ids >= 0).all()
    assert (store.read(0, len(store)) >= 0).all()


def test_concat_packing_predicts_across_documents_and_has_no_cu_seqlens() -> None:
    tokens = np.array([1, 2, EOS, 3, 4], dtype=np.uint16)
    batch = Samples([MemoryStore(tokens, EOS)], seq_len=4, seed=0).batch([0])
    assert batch.input_ids.tolist() == [[1, 2, EOS, 3]]
    assert batch.labels.tolist() == [[2, EOS, 3, 4]]
    assert batch.cu_seqlens is None


@settings(deadline=None)
@given(
    tokens=st.lists(st.sampled_from([65, 66, EOS]), min_size=2, max_size=60),
    seq_len=st.integers(1, 12),
    micro_batch=st.integers(1, 3),
)
def test_cu_seqlens_are_well_formed_for_any_text(
    tokens: list[int], seq_len: int, micro_batch: int
) -> None:
    if len(tokens) <= seq_len:
        return
    batch = packed(tokens, seq_len, micro_batch)
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    assert batch.cu_seqlens.dtype == torch.int32
    bounds = batch.cu_seqlens.tolist()
    assert len(ids) == len(labels) == batch.input_ids.numel() == micro_batch * seq_len
    assert bounds == sorted(set(bounds))
    assert set(range(0, len(ids) + 1, seq_len)) <= set(bounds) <= set(range(len(ids) + 1))
    for start, end in pairwise(bounds):
        assert EOS not in ids[start : end - 1]  # one document, or a part of one
        assert labels[start : end - 1] == ids[start + 1 : end]
        assert (labels[end - 1] == -100) == (ids[end - 1] == EOS)
        assert ids[end - 1] == EOS or end % seq_len == 0


def test_positions_restart_at_each_document() -> None:
    batch = packed([1, 2, EOS, 3, EOS, EOS, 4, 5, 6], seq_len=8)
    assert batch.positions().tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    rows = Batch(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
    assert rows.positions().tolist() == [0, 1, 2, 0, 1, 2]


def test_to_moves_every_tensor_of_a_batch() -> None:
    packed_batch = packed([1, 2, EOS, 3, 4], seq_len=4)
    for batch in (packed_batch, replace(packed_batch, cu_seqlens=None)):
        moved = batch.to("meta")
        for name in ("input_ids", "labels", "cu_seqlens"):
            before, after = getattr(batch, name), getattr(moved, name)
            assert (before is None and after is None) or after.device.type == "meta"
        assert moved.label_count == batch.label_count == 3


def test_a_corpus_smaller_than_one_sample_is_refused_with_the_fix() -> None:
    stores = [MemoryStore(np.arange(size), name=name) for size, name in ((9, "large"), (4, "tiny"))]
    message = r"data\.seq_len = 4: tiny has 4 tokens.*lower data\.seq_len"
    with pytest.raises(ValueError, match=message):
        Samples(stores, fractions=[0.5, 0.5], seq_len=4, seed=0)
    assert samples_of(counting(1), micro_batch=2) == [0, 0]


def test_the_fingerprint_depends_on_tokens_length_and_seed_only() -> None:
    def fingerprint(tokens: str = "a", seq_len: int = 4, seed: int = 0) -> str:
        store = MemoryStore(np.arange(50), fingerprint=tokens)
        return Samples([store], seq_len=seq_len, seed=seed).fingerprint

    assert fingerprint() == fingerprint()
    others = [fingerprint("b"), fingerprint(seq_len=5), fingerprint(seed=1), fingerprint()]
    assert len(set(others)) == 4


@pytest.mark.gpu
def test_batches_arrive_on_the_device_in_order_without_a_host_sync() -> None:
    ids = [torch.full((2, 64), i) for i in range(3)]
    batches = [Batch(x, x + 1, torch.tensor([0, 64, 128])) for x in ids]
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = []
        for batch in (batch.to("cuda") for batch in batches):
            assert batch.input_ids.device.type == batch.labels.device.type == "cuda"
            sums.append(batch.input_ids.sum() + batch.cu_seqlens.sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [int(x) for x in sums] == [128 * i + 192 for i in range(3)]


def test_the_log_says_how_much_of_the_data_a_run_reads() -> None:
    stores = [MemoryStore(np.arange(1_004), name="a"), MemoryStore(np.arange(41), name="b")]

    def lines(fractions: list[float], samples: int) -> list[str]:
        return Samples(stores, fractions=fractions, seq_len=10, seed=0).describe(samples)

    read = "tokens (tokenizer none); the run consumes"
    assert lines([0.9, 0.1], 100) == [
        f"a: 1,004 {read} 90 samples of 10: 90.0% of them, once",
        f"b: 41 {read} 10 samples of 10: 2.50 epochs",
    ]
    (*_, warning) = lines([0.5, 0.5], 80)
    assert warning.startswith("WARNING: b: 41 tokens, 10 epochs: the model will memorize it")
    assert "WARNING" not in "".join(lines([0.8, 0.2], 80)), "four epochs"
    stores[1].grows, stores[1].size = True, 100  # a token has one byte or more
    (_, b, warning) = lines([0.5, 0.5], 100)
    assert b.startswith("b: 100 bytes (tokenizer none); the run consumes 50 samples of 10: tok")
    assert warning.startswith("WARNING: b: 100 bytes, 5 epochs: ")
    stores[1].size = None
    assert [line[:15] for line in lines([0.5, 0.5], 100)] == ["a: 1,004 tokens", "b: size unknown"]


def test_a_corpus_of_any_size_is_shuffled_without_a_table() -> None:
    size = 10**15
    indices = {shuffled_index(index, size, 7) for index in range(1_000)}
    assert len(indices) == 1_000
    assert max(indices) > 0.99 * size
    assert min(indices) < 0.01 * size


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
    start=st.integers(0, 10**15),
)
def test_a_mixture_spreads_its_sources_evenly_and_numbers_each_without_gaps(
    weights: list[float], start: int
) -> None:
    fractions = [weight / sum(weights) for weight in weights]
    mixer = Mixer(fractions, [str(source) for source in range(len(fractions))])
    numbers: dict[int, list[int]] = {source: [] for source in range(len(fractions))}
    for position in range(start, start + 300):
        source, index = mixer.locate(position)
        numbers[source].append(index)
    for source, indices in numbers.items():
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else True
        assert abs(len(indices) - 300 * fractions[source]) < len(fractions) + 1


def test_a_fraction_below_the_resolution_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data\.source: 'rare' would get 1e-07"):
        Mixer([1 - 1e-7, 1e-7], ["common", "rare"])
    Mixer([1 - 6e-7, 6e-7], ["common", "rare"])  # rounded up to one in a million
