"""Tile sizes for another chip, or by another choice than that of nsa/ops/triton/configs.py."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from nsa.ops.triton import configs


def choosing_for(chip: str) -> Any:
    """Choose tile sizes for this chip, which the machine may lack, inside the block."""
    return mock.patch.object(configs, "chip_of", return_value=configs.AMD.get(chip, chip))


def override_choices(choice: Callable[[str, list[configs.Config]], configs.Config]) -> Any:
    """Let `choice(operation, candidates)` choose inside the block."""

    def chosen(key: configs.Key) -> configs.Config:
        return choice(key[0], configs.candidates(*key))

    return mock.patch.object(configs, "_first_that_runs", chosen)


def small_tiles() -> Any:
    """Let kernels have several tiles of rows and keys in short sequences, inside the block."""
    return override_choices(lambda *_: configs.Config(16, 16, 4, 1))
