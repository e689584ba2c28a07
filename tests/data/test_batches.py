"""Indexed batches: computed from (samples consumed, micro-step, rank) alone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.batches import Batch, Batches
from nsa.data.config import DataConfig
from nsa.data.factory import open_store
from nsa.data.token_store import TokenStore

EOS = 257
SHAPE = {"seq_len": 4, "micro_batch": 1, "accumulation": 1, "world_size": 1, "seed": 0}


def counting(samples: int, seq_len: int = 4, **shape: int) -> Batches:
    """Batches over 0, 1, 2, …, in which a row's first token identifies its sample."""
    tokens = np.arange(samples * seq_len + 1)
    shape = {"micro_batch": 1, "accumulation": 1, "world_size": 1, "seed": 3} | shape
    return Batches([TokenStore([tokens], -1, 1.0)], seq_len=seq_len, **shape)


def at_step(batches: Batches, step: int, micro_step: int, rank: int) -> Batch:
    return batches.batch(step * batches.samples_per_step, micro_step, rank)


def samples_of(batches: Batches, step: int) -> list[int]:
    """The samples of a whole step, in the order of consumption."""
    return [
        int(first) // batches.seq_len
        for micro_step in range(batches.accumulation)
        for rank in range(batches.world_size)
        for first in at_step(batches, step, micro_step, rank).input_ids[:, 0]
    ]


def packed(tokens: list[int], seq_len: int, micro_batch: int = 1) -> tuple[Batch, np.ndarray]:
    """The first packed batch of `tokens`, and the sample number of each of its rows."""
    store = TokenStore([np.array(tokens, dtype=np.uint16)], EOS, 1.0)
    shape = {"seq_len": seq_len, "micro_batch": micro_batch, "accumulation": 1, "world_size": 1}
    batch = Batches([store], **shape, seed=0, packing="documents").batch(0, 0, 0)
    order = counting((len(tokens) - 1) // seq_len, seq_len, micro_batch=micro_batch, seed=0)
    return batch, np.array(samples_of(order, 0))


def digest_of_batches() -> str:
    digest = hashlib.sha256()
    for packing in ("concat", "documents"):
        for split, source in (("val", "embedded"), ("train", "synthetic")):
            config = DataConfig(
                source=source, packing=packing, seq_len=256, synthetic_bytes=100_000
            )
            shape = {"micro_batch": 3, "accumulation": 2, "world_size": 2, "seed": 1337}
            store = open_store(config, source, split)
            assert store is not None
            batches = Batches([store], seq_len=256, packing=packing, **shape)
            for index in ((0, 0, 0), (17, 1, 0), (10_000, 0, 1)):
                batch = at_step(batches, *index)
                digest.update(batch.input_ids.numpy().tobytes() + batch.labels.numpy().tobytes())
    return digest.hexdigest()


IN_ANOTHER_PROCESS = """
import sys
sys.path.insert(0, {folder!r})
from test_batches import digest_of_batches
print(digest_of_batches())
"""


def test_another_process_with_another_hash_seed_gets_the_same_batches() -> None:
    code = IN_ANOTHER_PROCESS.format(folder=os.path.dirname(__file__))
    environment = {**os.environ, "PYTHONHASHSEED": "4321"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == digest_of_batches()


def test_a_batch_does_not_depend_on_those_read_before() -> None:
    shape = {"micro_batch": 2, "accumulation": 2, "world_size": 2}
    used, keys = counting(13, **shape), [(9, 1, 0), (0, 0, 1), (9, 1, 0), (4, 0, 0)]
    seen = [at_step(used, *key).input_ids for key in keys]
    assert torch.equal(seen[0], seen[2])
    for key, ids in zip(keys, seen, strict=True):
        assert torch.equal(at_step(counting(13, **shape), *key).input_ids, ids)


@settings(deadline=None)
@given(
    samples=st.integers(1, 40),
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 2**64),
)
def test_each_epoch_uses_every_sample_exactly_once_wherever_it_ends(
    samples: int, micro_batch: int, accumulation: int, world_size: int, seed: int
) -> None:
    shape = {"micro_batch": micro_batch, "accumulation": accumulation, "world_size": world_size}
    batches = counting(samples, **shape, seed=seed)
    assert batches.samples == [samples]
    consumed: list[int] = []
    step = 0
    while len(consumed) < 3 * samples:
        consumed += samples_of(batches, step)
        step += 1
    for epoch in range(3):
        assert sorted(consumed[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_no_sample_repeats_within_an_epoch_across_ranks_and_micro_steps() -> None:
    batches = counting(96, micro_batch=2, accumulation=3, world_size=4)
    seen = [
        {int(first) for first in at_step(batches, step, micro_step, rank).input_ids[:, 0]}
        for step in range(4)
        for micro_step in range(3)
        for rank in range(4)
    ]
    assert all(len(firsts) == 2 for firsts in seen)
    assert len(set.union(*seen)) == 96


def test_each_epoch_and_each_seed_has_a_different_order() -> None:
    epoch_as_step = {"micro_batch": 50}
    batches = counting(50, **epoch_as_step)
    orders = [tuple(samples_of(batches, epoch)) for epoch in range(5)]
    orders += [tuple(samples_of(counting(50, seed=seed, **epoch_as_step), 0)) for seed in (4, 5)]
    assert len(set(orders)) == 7
    assert tuple(range(50)) not in orders


def test_a_global_batch_holds_the_same_samples_however_it_is_divided() -> None:
    undivided = counting(41, micro_batch=12)
    divided = counting(41, micro_batch=2, accumulation=2, world_size=3)
    for step in range(8):
        assert samples_of(divided, step) == samples_of(undivided, step)


@settings(deadline=None)
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
        batches = counting(23, **shape)
        for _ in range(data.draw(number, label="steps")):
            before = len(consumed)
            consumed += [
                int(first) // batches.seq_len
                for micro_step in range(batches.accumulation)
                for rank in range(batches.world_size)
                for first in batches.batch(before, micro_step, rank).input_ids[:, 0]
            ]
    undivided = counting(23, micro_batch=len(consumed))
    assert consumed == samples_of(undivided, 0)


def test_a_resumed_rank_reads_what_it_would_have_read() -> None:
    batches = counting(13, micro_batch=2, accumulation=3, world_size=2)
    from_start = batches.for_rank(1)
    expected = [next(from_start).input_ids for _ in range(15)]
    resumed = batches.for_rank(1, consumed=2 * batches.samples_per_step)
    for ids in expected[6:]:
        assert torch.equal(next(resumed).input_ids, ids)


def test_a_mixture_gives_each_source_its_fraction_and_each_sample_once_an_epoch() -> None:
    stores = [
        TokenStore([np.arange(start, start + 4 * samples + 1)], -1, 1.0, name=str(start))
        for start, samples in ((0, 6_000), (1_000_000, 2_000))
    ]
    batches = Batches(
        stores,
        fractions=[0.75, 0.25],
        seq_len=4,
        micro_batch=8_000,
        accumulation=1,
        world_size=1,
        seed=0,
    )
    firsts = batches.batch(0, 0, 0).input_ids[:, 0]
    assert len(set(firsts.tolist())) == 8_000
    assert int((firsts >= 1_000_000).sum()) == 2_000
    first_tenth = firsts[:800]
    assert int((first_tenth >= 1_000_000).sum()) == 200


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_labels_are_the_next_tokens_and_share_no_memory_with_the_inputs(packing: str) -> None:
    store = counting(6, seq_len=5).stores[0]
    shape = {"seq_len": 5, "micro_batch": 1, "accumulation": 1, "world_size": 1}
    batch = Batches([store], **shape, seed=0, packing=packing).batch(0, 0, 0)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.shape == batch.labels.shape == (1, 5)
    assert torch.equal(batch.labels, batch.input_ids + 1)
    batch.labels.fill_(-100)
    assert (batch.input_ids >= 0).all()
    assert (store.read(0, len(store)) >= 0).all()


def test_concat_packing_predicts_across_documents_and_has_no_cu_seqlens() -> None:
    tokens = np.array([1, 2, EOS, 3, 4], dtype=np.uint16)
    shape = {"seq_len": 4, "micro_batch": 1, "accumulation": 1, "world_size": 1, "seed": 0}
    batch = Batches([TokenStore([tokens], EOS, 1.0)], **shape).batch(0, 0, 0)
    assert batch.input_ids.tolist() == [[1, 2, EOS, 3]]
    assert batch.labels.tolist() == [[2, EOS, 3, 4]]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64  # stored as uint16
    assert batch.cu_seqlens is None
    assert batch.tokens == 4


def test_document_packing_starts_a_document_after_each_eos_and_ignores_labels_across() -> None:
    batch, _ = packed([1, 2, EOS, 3, EOS, EOS, 4, 5], seq_len=7)
    assert batch.input_ids.tolist() == [[1, 2, EOS, 3, EOS, EOS, 4]]
    assert batch.labels.tolist() == [[2, EOS, -100, EOS, -100, -100, 5]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 7]
    assert batch.cu_seqlens.dtype == torch.int32


def test_packed_rows_are_concatenated_and_no_document_crosses_a_row() -> None:
    tokens = [10, 11, 12, EOS, 20, 21, 22, 23, 30]  # the first row ends with its document
    batch, order = packed(tokens, seq_len=4, micro_batch=2)
    rows = [([10, 11, 12, EOS], [11, 12, EOS, -100]), ([20, 21, 22, 23], [21, 22, 23, 30])]
    first, second = (rows[sample] for sample in order)
    assert batch.input_ids.tolist() == [first[0] + second[0]]
    assert batch.labels.tolist() == [first[1] + second[1]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 4, 8]


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
    batch, _ = packed(tokens, seq_len, micro_batch)
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    assert batch.cu_seqlens is not None
    bounds = batch.cu_seqlens.tolist()
    assert len(ids) == len(labels) == batch.tokens == micro_batch * seq_len
    assert bounds[0] == 0
    assert bounds[-1] == batch.tokens
    assert bounds == sorted(set(bounds))
    assert set(range(0, batch.tokens, seq_len)) <= set(bounds)
    for start, end in pairwise(bounds):
        assert EOS not in ids[start : end - 1]  # one document, or a part of one
        assert labels[start : end - 1] == ids[start + 1 : end]
        assert (labels[end - 1] == -100) == (ids[end - 1] == EOS)
        assert ids[end - 1] == EOS or end % seq_len == 0


def test_to_moves_every_tensor_of_a_batch() -> None:
    packed_batch, _ = packed([1, 2, EOS, 3, 4], seq_len=4)
    for batch in (packed_batch, replace(packed_batch, cu_seqlens=None)):
        moved = batch.to("meta", non_blocking=True)
        for name in ("input_ids", "labels", "cu_seqlens"):
            before, after = getattr(batch, name), getattr(moved, name)
            assert (before is None and after is None) or after.device.type == "meta"


def test_a_corpus_smaller_than_one_sample_is_refused_with_the_fix() -> None:
    with pytest.raises(
        ValueError, match=r"data\.seq_len = 4: tiny has 4 tokens.*lower data\.seq_len"
    ):
        Batches([TokenStore([np.arange(4)], -1, 1.0, name="tiny")], **SHAPE)
    assert counting(1).samples == [1]


def test_the_fingerprint_depends_on_tokens_length_and_seed_only() -> None:
    def fingerprint(tokens: str = "a", **changes: int) -> str:
        store = TokenStore([np.arange(50)], -1, 1.0, fingerprint=tokens)
        return Batches([store], **SHAPE | changes).fingerprint

    assert fingerprint() == fingerprint(micro_batch=2, accumulation=3, world_size=4)
    others = [fingerprint("b"), fingerprint(seq_len=5), fingerprint(seed=1), fingerprint()]
    assert len(set(others)) == 4
