"""Cross-entropy in PyTorch and in its kernel, against its definition in float64."""

import pytest
import torch
from torch import Tensor

from nsa.model import loss
from nsa.ops import per_token as torch_per_token
from nsa.ops import triton
from nsa.ops.per_token import cross_entropy_
from nsa.ops.triton import per_token
from tests.kernel_launches import recording
from tests.ops.cases import default, with_gradients
from tests.ops.triton.parity import DEVICE, assert_exact_enough

backends = pytest.mark.parametrize("backend", ["blockwise", "triton"])


def inputs(rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Logits in float32, and labels of which every third is ignored and the last is the largest."""
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary, generator=draw)
    labels = torch.randint(vocabulary, (rows,), generator=draw)
    labels[::3], labels[-1] = -100, vocabulary - 1
    return logits, torch.stack([labels, labels], 1)[:, 0]  # a view that is not contiguous


def defined(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """−log p[label] and p − onehot(label), both 0 for label −100."""
    p = logits.double().softmax(1)
    losses, gradient = torch.zeros(len(labels), dtype=p.dtype), torch.zeros_like(p)
    for row, label in enumerate(labels.tolist()):
        if label != -100:
            losses[row] = -p[row, label].log()
            gradient[row] = p[row]
            gradient[row, label] -= 1
    return losses, gradient


def computed(backend: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient that is left in a copy of the logits."""
    logits, labels = logits.clone().to(DEVICE), labels.to(DEVICE)
    return cross_entropy_(logits, labels, True, backend=backend).cpu(), logits.cpu()


def assert_cross_entropy_parity(rows: int, vocabulary: int) -> None:
    logits, labels = inputs(rows, vocabulary)
    usual = computed("blockwise", logits, labels)
    assert_exact_enough(computed("triton", logits, labels), usual, defined(logits, labels))


# One tile, part of one, several with and without a rest, one row, one logit.
@pytest.mark.parametrize("size", [(5, 64), (7, 37), (4, 192), (9, 150), (1, 65), (3, 1)], ids=str)
def test_losses_and_gradients_of_the_kernel_are_those_of_the_definition(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_token, "COLUMNS", 64)
    assert_cross_entropy_parity(*size)


def test_a_real_vocabulary_takes_several_tiles() -> None:
    assert_cross_entropy_parity(2, 50_257)


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("rows", [1, 2, 11])
def test_losses_and_gradients_in_pytorch_are_those_of_the_definition(
    rows: int, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_per_token, "SOFTMAX_LOGITS", rows_at_once * 37)
    logits, labels = inputs(rows, 37)
    actual = computed("blockwise", logits.double(), labels)
    torch.testing.assert_close(actual, defined(logits, labels))


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_losses_are_float32_and_gradients_are_rounded_once(
    dtype: torch.dtype, backend: str
) -> None:
    logits, labels = inputs(6, 150)
    losses, gradient = computed(backend, logits.to(dtype), labels)
    expected, exact = defined(logits.to(dtype), labels)
    torch.testing.assert_close(losses, expected.float())
    torch.testing.assert_close(gradient, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@backends
def test_ignored_rows_give_zeros_whatever_their_logits(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_token, "COLUMNS", 64)
    logits, labels = torch.full((3, 150), torch.nan), torch.full((3,), -100)
    for result in computed(backend, logits, labels):
        assert not result.any()  # NaN is true


@pytest.mark.parametrize("label", [-1, -99, 150])
def test_a_label_outside_the_vocabulary_gives_a_loss_of_nan(label: int) -> None:
    """On a GPU an error would wait for the device; a NaN loss ends the run."""
    logits, labels = inputs(3, 150)
    labels[1] = label
    assert computed("triton", logits, labels)[0].isnan().tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what NumPy says of NaN and infinities
@pytest.mark.parametrize("value", default(1, [torch.nan, torch.inf]))
def test_logits_that_are_not_finite_give_nan(value: float) -> None:
    logits, labels = inputs(2, 150)
    logits[1, 7] = value
    losses, gradient = computed("triton", logits, labels)
    assert losses.isnan().tolist() == [False, True]
    assert gradient[1].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in subtract:RuntimeWarning")
def test_large_logits_neither_overflow_nor_lose_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a whole tile is -inf before the first finite logit."""
    monkeypatch.setattr(per_token, "COLUMNS", 16)
    logits = torch.full((2, 40), -torch.inf)
    logits[0, 30:], logits[1, 20], logits[1, 21] = 3e38, 1e4, 1e4 - 1
    labels = torch.tensor([35, 21])
    losses, gradient = computed("triton", logits, labels)
    expected, exact = computed("blockwise", logits.double(), labels)
    torch.testing.assert_close(losses, expected.float())
    torch.testing.assert_close(gradient, exact.float())


@pytest.mark.parametrize("with_gradients", [False, True])
def test_it_is_one_launch_that_reads_no_value(with_gradients: bool) -> None:
    logits = torch.empty(4, 150, device="meta")
    labels = torch.empty(4, dtype=torch.int64, device="meta")
    with recording() as launches:
        losses = cross_entropy_(logits, labels, with_gradients)
    assert losses.shape == (4,)
    (launch,) = launches
    assert launch.constants["GRADIENT"] is with_gradients


@backends
def test_without_gradients_the_logits_stay(backend: str) -> None:
    logits, labels = (x.to(DEVICE) for x in inputs(5, 150))
    before = logits.clone()
    losses = cross_entropy_(logits, labels, False, backend=backend)
    assert torch.equal(logits, before)
    assert torch.equal(losses.cpu(), computed(backend, before, labels)[0])


def test_the_models_loss_and_gradients_with_the_kernel_are_those_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In several chunks; `auto` would not interpret the kernel."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 8, generator=draw).to(DEVICE) for n in (20, 70)]
    labels = torch.randint(70, (20,), generator=draw).to(DEVICE)
    labels[::3] = -100
    monkeypatch.setattr(loss, "CHUNK_LOGITS_CPU", 7 * 70)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 7 * 70)

    def results(dtype: torch.dtype) -> list[Tensor]:
        return with_gradients(
            lambda h, w: loss.linear_cross_entropy(h, w, labels), [x.to(dtype) for x in tensors]
        )

    usual, exact = results(torch.float32), results(torch.float64)
    monkeypatch.setattr(torch_per_token, "dispatch", lambda *_, **__: triton)
    with recording() as launches:
        results(torch.float32)
    assert len(launches) == 3  # one per chunk
    assert_exact_enough(results(torch.float32), usual, exact)
