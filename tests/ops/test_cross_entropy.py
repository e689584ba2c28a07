"""Cross-entropy in PyTorch against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.ops import fallback_counts, per_token, reset_fallback_counts
from nsa.ops.per_token import cross_entropy_

VOCABULARY = 37


def inputs(rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits in float64, and labels of which every third is ignored."""
    draw = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocabulary, generator=draw, dtype=torch.float64)
    labels = torch.randint(vocabulary, (rows,), generator=draw)
    labels[::3] = -100
    return logits, labels


def defined(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """−log p[label] and p − onehot(label), both 0 for label −100."""
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    losses, gradient = torch.zeros(len(labels), dtype=logits.dtype), torch.zeros_like(p)
    for row, label in enumerate(labels.tolist()):
        if label != -100:
            losses[row] = -p[row, label].log()
            gradient[row] = p[row]
            gradient[row, label] -= 1
    return losses, gradient


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("rows", [1, 2, 11])
def test_losses_and_gradients_are_those_of_the_definition(
    rows: int, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_token, "SOFTMAX_LOGITS", rows_at_once * VOCABULARY)
    logits, labels = inputs(rows)
    expected, gradient = defined(logits, labels)
    untouched = logits.clone()
    torch.testing.assert_close(cross_entropy_(logits, labels, False), expected)
    assert torch.equal(logits, untouched)
    torch.testing.assert_close(cross_entropy_(logits, labels, True), expected)
    torch.testing.assert_close(logits, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_losses_are_float32_and_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    logits, labels = inputs(12)
    logits = logits.to(dtype)
    expected, gradient = defined(logits.double(), labels)
    losses = cross_entropy_(logits, labels, True)
    torch.testing.assert_close(losses, expected.float())
    torch.testing.assert_close(logits, gradient.to(dtype))


def test_an_ignored_row_gives_zeros_whatever_its_logits() -> None:
    logits, labels = torch.full((2, 5), torch.nan), torch.tensor([-100, -100])
    assert not cross_entropy_(logits, labels, True).any()
    assert not logits.any()


def test_a_fallback_is_counted() -> None:
    reset_fallback_counts()
    cross_entropy_(*inputs(2), False)
    ((operation, backend, _),) = fallback_counts()
    assert (operation, backend) == ("cross_entropy", "triton")
