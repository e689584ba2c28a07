"""Token stores: one stream of tokens per split, with an end of text after each document."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.builtin import embedded, synthetic
from nsa.data.config import DataConfig
from nsa.data.source import is_validation
from nsa.data.token_store import TokenStore, coverage
from nsa.data.tokenizer import ByteTokenizer
from tests.data.texts import documents_of, open_store

SYNTHETIC = DataConfig(source="synthetic")


def test_the_splits_hold_all_documents_in_order_each_followed_by_eos() -> None:
    train, val = (documents_of(open_store(SYNTHETIC, split)) for split in ("train", "val"))
    texts = [document.text for document in synthetic().read_all()]
    assert train == [text for text in texts if not is_validation(text, 0.05)]
    assert val == [text for text in texts if is_validation(text, 0.05)]
    assert train
    assert val


def test_bytes_per_token_divides_text_by_all_tokens() -> None:
    store = open_store(DataConfig(), "val")
    texts = [
        document.text for document in embedded().read_all() if is_validation(document.text, 0.05)
    ]
    size = sum(map(len, texts))
    assert store.bytes_per_token == pytest.approx(size / (size + len(texts)), rel=1e-12)
    assert store.vocab_size == ByteTokenizer.vocab_size
    assert store.read(0, len(store)).dtype == np.uint16


def test_different_tokens_have_different_fingerprints() -> None:
    stores = [open_store(SYNTHETIC, "train"), open_store(SYNTHETIC, "val")]
    stores.append(open_store(DataConfig(source="synthetic", held_out=0.06), "train"))
    assert len({store.fingerprint for store in stores}) == 3
    assert open_store(SYNTHETIC, "train").fingerprint == stores[0].fingerprint


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_reads_cross_the_borders_of_pieces(lengths: list[int], data: st.DataObject) -> None:
    tokens = np.arange(sum(lengths))
    store = TokenStore(np.split(tokens, np.cumsum(lengths)[:-1]), -1, 1.0)
    assert len(store) == len(tokens)
    if len(tokens):
        start = data.draw(st.integers(0, len(tokens) - 1))
        stop = data.draw(st.integers(start + 1, len(tokens)))
        assert store.read(start, stop).tolist() == tokens[start:stop].tolist()


def test_coverage_reports_samples_epochs_and_left_over_tokens() -> None:
    stores = [
        TokenStore([np.arange(1_004)], -1, 1.0, name="a"),
        TokenStore([np.arange(41)], -1, 1.0),
    ]
    assert coverage(stores, [0.9, 0.1], 10, samples=100) == [
        "a: 1,004 tokens, 100 samples of 10, no padding, and 3 tokens left over; "
        "the run consumes 90: 90.0% of them, once",
        "tokens: 41 tokens, 4 samples of 10, no padding; the run consumes 10: 2.50 epochs",
    ]
    (*_, warning) = coverage(stores, [0.5, 0.5], 10, samples=80)
    assert warning.startswith("WARNING: tokens: 41 tokens, 10 epochs: the model will memorize it")
    assert "WARNING" not in "".join(coverage(stores, [0.8, 0.2], 10, samples=80)), "four epochs"
