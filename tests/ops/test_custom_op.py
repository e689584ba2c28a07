"""custom_op.py registers ops by private names of torch, which a version may change."""

from __future__ import annotations

from pathlib import Path

import torch

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_private_names_are_those_of_the_versions_of_torch_that_the_project_allows() -> None:
    """To allow another: compare its torch/_library/custom_ops.py with custom_op.py first."""
    assert '"torch>=2.8,<2.14"' in PYPROJECT.read_text()
    assert (2, 8) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
