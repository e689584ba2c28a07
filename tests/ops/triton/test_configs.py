"""Tile sizes: the candidates, and the choice between them."""

from itertools import product

import pytest
import torch

from nsa.ops.triton.configs import CHIPS, Config, candidates, choose_config
from tests.ops.tiles import choosing_for, override_choices
from tests.ops.triton.parity import KERNELS

SIZES, BF16 = (64, 64), torch.bfloat16
LIKE = torch.empty(0, dtype=BF16)
FIRST, SECOND = candidates("window_forward", SIZES, BF16)[:2]


def taken() -> Config:
    return choose_config("window_forward", SIZES, LIKE)


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
def test_tiles_of_amds_chips_have_two_stages_and_the_first_fits_in_64_kb(kernel: str) -> None:
    """Two steps of keys and values, and a tile of queries, in bf16."""
    for size, dtype in product([64, 128, 256], [BF16, torch.float32]):
        options = candidates(kernel, (size, size), dtype, "gfx942")
        for tile in options:
            assert tile.stages <= 2
            # Eight warps leave a thread 256 registers: only in tiles chosen for small cards.
            assert tile.warps <= 4 or (size < 256 and dtype == BF16)
            assert set(tile.options()) == {"num_warps", "num_stages"}, "no option of NVIDIA's"
        if size < 256 and dtype == BF16:
            assert options[0].warps <= 4
            assert 2 * size * (options[0].rows + 2 * options[0].keys) <= 64 * 1024


def test_a_limit_on_registers_is_a_compile_option() -> None:
    limited = Config(128, 64, 8, 3, 128)
    assert limited.options() == {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
    assert Config(128, 64, 8, 3).options() == {"num_warps": 8, "num_stages": 3}


def test_an_override_chooses_among_the_candidates_and_ends_with_its_block() -> None:
    with override_choices(lambda operation, options: options[1]):
        assert taken() == SECOND
    assert taken() == FIRST
