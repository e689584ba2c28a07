"""Tile sizes: few candidates, the first or the measured one, and nothing that stops a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nsa.ops.triton import configs
from nsa.ops.triton.configs import (
    Config,
    candidates,
    choose_config,
    override_choices,
    save_tuned,
    tuning_key,
)
from tests.ops.triton.parity import KERNELS

SIZES, BF16 = (64, 64), torch.bfloat16
FIRST, SECOND = candidates("band_forward", SIZES, BF16)[:2]
KEY = tuning_key("band_forward", SIZES, BF16)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configs._tuned.cache_clear()
    yield
    configs._tuned.cache_clear()


def chosen() -> Config:
    return choose_config("band_forward", SIZES, BF16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_there_are_one_to_four_candidates_and_every_one_another(
    kernel: str, size: int, dtype: torch.dtype
) -> None:
    options = candidates(kernel, (16, size), dtype)
    wide_keys = candidates(kernel, (size, 16), dtype)
    for some in (options, wide_keys):
        assert 1 <= len(some) <= 4
        assert len(set(some)) == len(some)
    assert wide_keys == options or size == 256  # small values leave room for larger tiles


def test_the_first_candidate_is_taken_where_nothing_was_measured() -> None:
    assert chosen() == FIRST


def test_a_kept_choice_is_what_the_next_launch_takes() -> None:
    assert chosen() == FIRST  # read before it was written
    path = save_tuned({KEY: SECOND})
    assert path.is_relative_to(configs.tuned_path().parent)
    assert chosen() == SECOND
    assert choose_config("band_keys", SIZES, BF16) == candidates("band_keys", SIZES, BF16)[0]
    assert choose_config("band_forward", (128, 64), BF16) != SECOND
    assert choose_config("band_forward", SIZES, torch.float16) == FIRST


def test_keeping_a_choice_leaves_the_others_that_were_kept() -> None:
    save_tuned({KEY: SECOND})
    other = candidates("select", (64, 0), BF16)[-1]
    save_tuned({tuning_key("select", (64, 0), BF16): other})
    assert (chosen(), choose_config("select", (64, 0), BF16)) == (SECOND, other)


def test_a_choice_that_is_no_candidate_any_more_falls_back_to_the_first() -> None:
    save_tuned({KEY: Config(48, 48, 3, 9), "an operation of another version": SECOND})
    assert chosen() == FIRST


def test_an_entry_that_is_none_falls_back_to_the_first() -> None:
    path = save_tuned({KEY: SECOND})
    path.write_text(json.dumps({KEY: [64, 64]}))
    configs._tuned.cache_clear()
    assert chosen() == FIRST


@pytest.mark.parametrize("text", ["", '{"band'])
def test_a_file_that_was_cut_off_is_passed_over_with_a_warning(text: str) -> None:
    path = configs.tuned_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match="is ignored.* tune again or delete it"):
        assert chosen() == FIRST


def test_writing_leaves_one_whole_file() -> None:
    path = save_tuned({KEY: SECOND})
    assert list(path.parent.iterdir()) == [path]
    assert json.loads(path.read_text()) == {KEY: [*vars(SECOND).values()]}


def test_a_forced_choice_goes_before_a_kept_one_and_ends_with_its_block() -> None:
    save_tuned({KEY: SECOND})
    forced = Config(16, 16, 1, 1)
    with override_choices(lambda operation, options: forced):
        assert chosen() == forced
    assert chosen() == SECOND


def test_home_is_where_choices_are_kept_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert configs.tuned_path().parent == Path.home() / ".cache" / "nsa-m7c"
