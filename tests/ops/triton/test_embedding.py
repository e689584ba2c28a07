"""The tied embedding's kernel: parity with PyTorch, sums rounded once, its launch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from nsa.ops import tied_embedding
from nsa.ops.triton import embedding
from nsa.ops.triton.configs import Config
from nsa.ops.triton.embedding import add_token_gradients_, triton_add_token_gradients_
from nsa.ops.triton.launch import recording
from tests.ops.cases import one_thread as one_thread
from tests.ops.cases import with_gradients
from tests.ops.triton.parity import DEVICE, RULE, assert_exact_enough


def both(tokens: Tensor, weight: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Embedded tokens, and logits of a tied head over fixed hidden states."""
    x, head = tied_embedding(tokens, weight, backend=backend)
    return x, torch.linspace(-1, 1, 5 * weight.shape[1]).to(head).view(5, -1) @ head.T


def assert_tied_embedding_parity(tokens: Tensor, width: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(int(tokens.max()) + 2, width, generator=draw).to(DEVICE)
    assert_exact_enough(
        *(
            with_gradients(partial(both, tokens.to(DEVICE), backend=backend), [weight.to(dtype)])
            for backend, dtype in RULE
        )
    )


TOKENS = {
    "once each": torch.tensor([[3, 0, 2]]),
    "runs of all lengths": torch.tensor([[5, 1, 5, 2, 5, 1, 5], [5, 5, 0, 5, 5, 2, 5]]),
    "one token": torch.zeros(2, 8, dtype=torch.int64),  # twice a whole tile
    "int32": torch.tensor([[1, 4, 1]], dtype=torch.int32),
}


@pytest.mark.parametrize("width", [8, 21])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS.keys())
def test_results_and_gradients_are_those_of_pytorch(
    tokens: Tensor, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "TILE", Config(4, 8, 4, 1))
    assert_tied_embedding_parity(tokens, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_frequent_tokens_sum_is_rounded_once(dtype: torch.dtype) -> None:
    """Rounding at each of 200 additions would lose most of them."""
    d_weight = torch.full((3, 8), 64.0, dtype=dtype, device=DEVICE)
    d_x = torch.full((200, 8), 0.125, dtype=dtype, device=DEVICE)
    tokens = torch.ones(200, dtype=torch.int64, device=DEVICE)
    add_token_gradients_(d_weight, d_x, tokens)
    assert d_weight[:, 0].tolist() == [64.0, 89.0, 64.0]


def test_the_op_matches_its_declaration() -> None:
    d_weight, d_x = torch.zeros(4, 8, device=DEVICE), torch.ones(3, 8, device=DEVICE)
    tokens = torch.tensor([1, 3, 1], device=DEVICE)
    torch.library.opcheck(
        triton_add_token_gradients_,
        (d_weight, d_x, tokens),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_it_is_one_launch_that_reads_no_value() -> None:
    d_x = torch.empty(2, 6, 300, device="meta")
    tokens = torch.empty(2, 6, dtype=torch.int64, device="meta")
    with recording() as launches:
        add_token_gradients_(d_x.new_empty(9, 300), d_x, tokens)
    assert [launch.grid for launch in launches] == [(12, 2)]
