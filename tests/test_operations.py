"""Operations and bytes of a pass, against counts by hand; a micro-batch of M7C stays fused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nsa.model import ModelConfig
from nsa.spec import NSASpec
from tests.bench.traffic import totals
from tests.operations import Operation, Recorder, record_operations

BATCH, SEQ_LEN = 2, 128


TOY = ModelConfig(
    vocab_size=256, layers=2, width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=96
)


def recorded(run: Callable[[Tensor], object]) -> list[Operation]:
    x = torch.empty(4, 6, device="meta")  # 96 bytes
    with Recorder() as recorder:
        run(x)
    return recorder.operations


def test_a_linear_is_three_products_and_its_views_are_free() -> None:
    with torch.device("meta"):
        linear = nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
        x = torch.empty(4, 3, 16, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.empty(4, 3, 8, dtype=torch.bfloat16)
    with Recorder() as recorder:
        linear(x).backward(gradient)
    assert [x.name for x in recorder.operations] == ["aten::mm"] * 3
    assert {x.bytes for x in recorder.operations} == {2 * (12 * 16 + 16 * 8 + 12 * 8)}
    assert {x.part for x in recorder.operations} == {"matrix products"}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x + x[:1], 96 + 24 + 96),
        (lambda x: x + x[:1].expand(4, 6), 96 + 24 + 96),
        (lambda x: x.add_(1), 96 + 96),
        (lambda x: x.copy_(x.new_empty(4, 6, dtype=torch.bfloat16)), 48 + 96),
        (lambda x: torch.mul(x, 2, out=torch.empty_like(x)), 96 + 96),
        (lambda x: x.new_zeros(5), 20),
    ],
    ids=["broadcast", "expanded", "in place", "copy", "out", "zeros"],
)
def test_bytes_are_of_inputs_and_outputs(run: Callable[[Tensor], object], expected: int) -> None:
    assert [x.bytes for x in recorded(run)] == [expected]


def test_of_an_embedding_a_row_per_token_counts() -> None:
    tokens, rows = torch.empty(3, 2, dtype=torch.long, device="meta"), 6 * 8 * 4
    table = torch.empty(50, 8, device="meta")
    with Recorder() as recorder:
        nn.functional.embedding(tokens, table)
    (gather,) = recorder.operations
    assert gather.bytes == tokens.numel() * 8 + 2 * rows


def test_kernels_read_and_rewrite_the_logits_and_the_gradient_that_others_wrote() -> None:
    def largest(name: str, kernel: str) -> int:
        launches = (y for x in operations if x.name == name for y in x.launches)
        return max(y.bytes for y in launches if y.name == kernel)

    operations = record_operations(TOY, BATCH, SEQ_LEN)
    tokens, logits = BATCH * SEQ_LEN, BATCH * SEQ_LEN * 256 * 2
    assert largest("nsa::linear_cross_entropy", "cross_entropy_kernel") == 2 * logits + tokens * 12
    q = BATCH * SEQ_LEN * 4 * 16 * 2
    selected = largest("nsa::triton_gated_backward", "selected_queries_kernel")
    assert 5 * q < selected < 5.5 * q  # q, do, keys and values, dq twice; lse, row sums and lists
    # q, do, keys and values and their gradients; lse, row sums and compressed keys
    gated = largest("nsa::triton_gated_backward", "band_keys_kernel")
    assert 4.5 * q < gated < 4.8 * q


@pytest.mark.parametrize(("tokens", "read"), [(4096, 3072), (1100, 76), (1024, 0)])
def test_queries_that_select_all_their_candidates_are_not_read(tokens: int, read: int) -> None:
    """Those before position 1,024, in whole tiles of 64."""
    launches = {y.name: y for x in record_operations(TOY, 1, tokens) for y in x.launches}
    q, lse, keys = 4 * 16 * 2, 4 * 4, NSASpec().compressed_len(tokens) * 2 * 16 * 2
    index = tokens * 2 * 16 * 4
    assert launches["select_kernel"].bytes == read * (q + lse) + keys + index


def test_rotary_reads_the_columns_that_it_rotates_or_copies() -> None:
    launches = {y.name: y for x in record_operations(TOY, BATCH, SEQ_LEN) for y in x.launches}
    tables = SEQ_LEN * 16 * 4
    columns = 4 * 16 + 2 * 2 * 2 * 16 + 4 * 3  # q, two of three copies, gates: read and written
    assert launches["rotary_kernel"].bytes == tables + 2 * BATCH * SEQ_LEN * columns * 2


def test_a_micro_batch_of_m7c_stays_fused() -> None:
    """The page's totals, and a little more: 303 operations of 34.9 GB."""
    total = totals(record_operations(ModelConfig(), 8, 2_048))[-1]
    most = {"operations": 320, "bytes": 35.0e9, "launches": 540, "launch_bytes": 48.0e9}
    for figure, limit in most.items():
        assert 0.94 * limit <= total[figure] <= limit, figure
