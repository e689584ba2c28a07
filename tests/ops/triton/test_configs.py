"""Tile sizes: the candidates, the choice between them, and the file of measured choices."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from nsa.ops.triton import configs
from nsa.ops.triton.configs import (
    CHIPS,
    SHORT,
    Config,
    candidates,
    choose_config,
    choosing_for,
    forget_tuned,
    override_choices,
    save_tuned,
    tuning_key,
)
from tests.ops.triton.parity import KERNELS

pytestmark = pytest.mark.usefixtures("own_cache")
SIZES, BF16 = (64, 64), torch.bfloat16
LIKE = torch.empty(0, dtype=BF16)
FIRST, SECOND = candidates("window_forward", SIZES, BF16)[:2]
KEY = tuning_key("window_forward", SIZES, BF16, 2048)


def taken() -> Config:
    return choose_config("window_forward", SIZES, LIKE, 2048)


@pytest.mark.parametrize("chip", CHIPS)
def test_there_are_one_to_four_distinct_candidates(chip: str) -> None:
    dtypes = torch.bfloat16, torch.float16, torch.float32
    for case in product(KERNELS, [16, 32, 64, 128, 256], dtypes):
        kernel, size, dtype = case
        options = candidates(kernel, (16, size), dtype, chip)
        wide_keys = candidates(kernel, (size, 16), dtype, chip)
        for group in (options, wide_keys):
            assert 1 <= len(group) <= 4, case
            assert len(set(group)) == len(group), case
        # Small values leave room for larger tiles.
        assert wide_keys == options or size == 256, case


def test_the_next_launch_takes_a_stored_choice() -> None:
    assert taken() == FIRST  # nothing was measured
    path = save_tuned({KEY: SECOND})
    assert list(configs.tuned_path().parent.iterdir()) == [path]
    other = candidates("select", (64, 0), BF16)[-1]
    save_tuned({tuning_key("select", (64, 0), BF16, 2048): other})
    assert (taken(), choose_config("select", (64, 0), LIKE, 2048)) == (SECOND, other)
    assert (
        choose_config("window_keys", SIZES, LIKE, 2048) == candidates("window_keys", SIZES, BF16)[0]
    )
    assert choose_config("window_forward", (128, 64), LIKE, 2048) != SECOND
    assert choose_config("window_forward", SIZES, LIKE.half(), 2048) == FIRST


@pytest.mark.parametrize(
    "entry", [[48, 48, 3, 9, None], [64, 64]], ids=["no candidate", "malformed"]
)
def test_a_stored_choice_that_cannot_be_taken_falls_back_to_the_first(
    entry: list[int | None],
) -> None:
    path = save_tuned({KEY: SECOND})
    other = tuning_key("an_operation_of_another_version", SIZES, BF16, 2048)
    path.write_text(json.dumps({KEY: entry, other: [*SECOND]}))
    forget_tuned()
    assert taken() == FIRST


@pytest.mark.parametrize("text", ["", '{"band'])
def test_a_truncated_file_is_ignored_with_a_warning(text: str) -> None:
    path = configs.tuned_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match="is ignored.* tune again or delete it"):
        assert taken() == FIRST


def test_short_and_long_sequences_have_separate_choices() -> None:
    save_tuned({KEY: SECOND})
    assert choose_config("window_forward", SIZES, LIKE, SHORT) == SECOND
    assert choose_config("window_forward", SIZES, LIKE, SHORT + 1) == FIRST


@pytest.mark.parametrize(
    ("chip", "first"),
    [
        *[("sm_80", (128, 32, 4, 2)), ("sm_90", (128, 64, 8, 3, 128))],
        *[("sm_100", (128, 64, 8, 3)), ("sm_103", (128, 64, 8, 3))],  # no limit of registers
        *[(chip, (64, 64, 4, 2)) for chip in ("sm_86", "sm_89", "sm_120", "gfx942", "gfx950")],
        ("sm_999", (64, 64, 4, 2)),
    ],
)
def test_a_chip_that_was_not_measured_takes_tiles_by_its_shared_memory(
    chip: str, first: tuple[int, ...]
) -> None:
    with choosing_for(chip):
        assert taken() == Config(*first)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [64, 128])
def test_first_tiles_of_small_cards_fit_in_64_kb(kernel: str, size: int) -> None:
    """Two steps of keys and values, and a tile of queries, in bf16."""
    tile = candidates(kernel, (size, size), BF16, "gfx942")[0]
    assert tile.stages <= 2
    assert tile.warps <= 4
    assert 2 * size * (tile.rows + 2 * tile.keys) <= 64 * 1024


def test_a_limit_on_registers_is_a_compile_option_and_is_stored() -> None:
    limited = Config(128, 64, 8, 3, 128)
    assert limited.options() == {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
    assert Config(128, 64, 8, 3).options() == {"num_warps": 8, "num_stages": 3}
    with choosing_for("sm_90"):
        options = candidates("window_forward", SIZES, BF16, "sm_90")
        assert limited in options
        save_tuned({KEY: limited})
        assert taken() == limited


def test_an_override_precedes_a_stored_choice_and_ends_with_its_block() -> None:
    save_tuned({KEY: SECOND})
    forced = Config(16, 16, 1, 1)
    with override_choices(lambda operation, options: forced):
        assert taken() == forced
    assert taken() == SECOND


def test_choices_are_stored_under_home_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert configs.tuned_path().parent == Path.home() / ".cache" / "nsa-m7c"
