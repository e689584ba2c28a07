"""Sources: which documents a split holds, and the token stream made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nsa.data import ByteTokenizer, DataConfig, TokenStore, embedded_files, open_split

SYNTHETIC = DataConfig(source="synthetic", synthetic_bytes=50_000)


def documents(store: TokenStore) -> list[bytes]:
    ends = np.flatnonzero(store.tokens == store.eos_id)
    assert ends[-1] == len(store.tokens) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [
        ByteTokenizer().decode(store.tokens[start:end])
        for start, end in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_embedded_stream_is_the_files_in_order_each_closed_by_eos(split: str) -> None:
    files = embedded_files(split)
    store = open_split(DataConfig(), split)
    assert documents(store) == [path.read_bytes() for path in files]
    assert store.tokens.max() < ByteTokenizer.vocab_size
    text_bytes = sum(path.stat().st_size for path in files)
    assert store.bytes_per_token == pytest.approx(text_bytes / (text_bytes + len(files)), rel=1e-12)


def test_held_out_files_are_never_in_train_and_are_five_percent() -> None:
    train, held_out = embedded_files("train"), embedded_files("val")
    assert not set(train) & set(held_out)
    assert len(held_out) / (len(train) + len(held_out)) == pytest.approx(0.05, abs=0.002)


def test_the_standard_library_is_enough_to_train_and_validate_on() -> None:
    assert len(open_split(DataConfig(), "train").tokens) > 4_000_000
    assert len(open_split(DataConfig(), "val").tokens) > 64 * 2_048


def test_files_come_sorted_by_path_and_without_what_distributions_differ_in(
    tmp_path: Path,
) -> None:
    kept = ["abc.py", "json/decoder.py", "json/encoder.py", "zipfile/sub/tests.py", "zlib.py"]
    dropped = [
        "site-packages/torch/nn.py",
        "test/test_abc.py",
        "json/tests/test_json.py",
        "unittest/test/dummy.py",
        "idlelib/run.py",
        "encodings/cp437.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "notes.txt",
    ]
    for name in [*reversed(kept), *dropped]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "json/__init__.py").write_text("")  # nothing to learn from
    found = [path.relative_to(tmp_path).as_posix() for path in embedded_files("train", tmp_path)]
    assert found == sorted(kept)


def test_the_held_out_files_do_not_depend_on_the_order_in_which_files_were_made(
    tmp_path: Path,
) -> None:
    names = [f"module_{number}.py" for number in range(60)]
    for root, order in ((tmp_path / "a", names), (tmp_path / "b", names[::-1])):
        root.mkdir()
        for name in order:
            (root / name).write_text("x = 1\n")
    held_out = [[path.name for path in embedded_files("val", tmp_path / root)] for root in "ab"]
    assert held_out[0] == held_out[1]
    assert held_out[0] == ["module_30.py", "module_5.py", "module_58.py"]


def test_a_python_without_sources_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.source = 'embedded'.*data\.source = 'synthetic'"):
        embedded_files("train", tmp_path)


def test_synthetic_text_is_a_pure_function_of_seed_and_split() -> None:
    first, again = open_split(SYNTHETIC, "train", 7), open_split(SYNTHETIC, "train", 7)
    assert np.array_equal(first.tokens, again.tokens)
    assert not set(documents(first)) & set(documents(open_split(SYNTHETIC, "train", 8)))
    assert not set(documents(first)) & set(documents(open_split(SYNTHETIC, "val", 7)))


@pytest.mark.parametrize("size", [1, 999, 50_000])
def test_synthetic_text_has_the_size_asked_for(size: int) -> None:
    store = open_split(DataConfig(source="synthetic", synthetic_bytes=size), "train", 7)
    assert sum(len(document) for document in documents(store)) == size
    assert round(store.bytes_per_token * len(store.tokens)) == size


def test_synthetic_documents_vary_in_length_and_share_their_words_with_validation() -> None:
    train = documents(open_split(SYNTHETIC, "train", 7))
    val = documents(open_split(SYNTHETIC, "val", 7))
    lengths = [len(document) for document in train]
    assert max(lengths) > 4 * min(lengths)
    lexicon = set(b" ".join(train).split())
    words = b" ".join(val).split()
    assert sum(word in lexicon for word in words) > 0.5 * len(words)
    # A document keeps to words of its own: that is what makes looking back worth while.
    longest = max(train, key=len).split()
    assert len(set(longest)) <= 32 < len(lexicon)


def test_a_wrong_split_source_or_seed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"split = 'test': choose one of train, val"):
        open_split(DataConfig(), "test")
    with pytest.raises(ValueError, match=r"data\.source = 'web'"):
        open_split(DataConfig(source="web"), "train")
    with pytest.raises(ValueError, match=r"train\.seed = -1"):
        open_split(SYNTHETIC, "train", -1)
    with pytest.raises(ValueError, match=r"data\.synthetic_bytes = 0"):
        open_split(DataConfig(source="synthetic", synthetic_bytes=0), "train")
