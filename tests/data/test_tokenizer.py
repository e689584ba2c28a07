"""The byte tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data import ByteTokenizer, DataConfig, build_tokenizer


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_survive_a_round_trip(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_specials_are_in_the_vocabulary_and_spell_nothing() -> None:
    tokenizer = build_tokenizer(DataConfig())
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert len(set(specials)) == 3
    assert all(256 <= special < tokenizer.vocab_size for special in specials)
    assert tokenizer.decode(np.array([specials[0], *b"ab", *specials[1:], -100, 50_303])) == b"ab"


def test_an_unknown_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer = 'words'.*byte"):
        build_tokenizer(DataConfig(tokenizer="words"))
