"""Cross-entropy and distillation against PyTorch's: values, gradients, rounding and memory."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from nsa.model import loss
from nsa.model.loss import (
    distillation_loss,
    linear_cross_entropy,
    loss_and_gradients,
    token_divergence,
)
from tests.model.models import build, tiny, tokens
from tests.ops.cases import Calls
from tests.peak_memory import print_peak
from tests.ranks import spawn_ranks

TOKENS, WIDTH, VOCABULARY = 700, 48, 900
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The unfused loss."""
    logits = F.linear(hidden, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


def inputs(
    dtype: torch.dtype, tokens: int = TOKENS, width: int = WIDTH, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight, and labels of which some are ignored."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=draw, dtype=torch.float64) / 4
    labels = torch.randint(vocabulary, (tokens,), generator=draw)
    labels[::7] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def with_gradients(
    function: Function, hidden: Tensor, weight: Tensor, labels: Tensor
) -> list[Tensor]:
    """The loss and its gradients, scaled from above by 1/3."""
    value = function(hidden, weight, labels)
    return [value.detach(), *torch.autograd.grad(value / 3, (hidden, weight))]


@pytest.fixture(params=[1, 5], ids=["one chunk", "five chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of chunks; five divide 700 tokens, but not 697."""
    if request.param > 1:
        monkeypatch.setattr(loss, "CHUNK_LOGITS_CPU", TOKENS * VOCABULARY // request.param)
    return request.param


@pytest.mark.parametrize("tokens", [0, 1, 697, TOKENS])
def test_loss_and_gradients_are_those_of_the_plain_loss(chunks: int, tokens: int) -> None:
    arguments = inputs(torch.float64, tokens)
    actual, expected = (with_gradients(f, *arguments) for f in (linear_cross_entropy, plain))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12)
    hidden, weight, labels = arguments
    with Calls() as recorded:
        value = linear_cross_entropy(hidden.detach(), weight, labels)
        (head,) = torch.autograd.grad(value / 3, weight)
    assert "zeros" not in recorded.names, "as large as the gradients"
    assert torch.equal(head, actual[2]), "also if only the head learns"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_error_is_at_most_twice_the_plain_losss(chunks: int, dtype: torch.dtype) -> None:
    """Against float64, plus the noise of a float32 sum over the tokens in another order."""
    hidden, weight, labels = inputs(dtype)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = with_gradients(plain, *wide, labels)
    actual, usual = (
        with_gradients(f, hidden, weight, labels) for f in (linear_cross_entropy, plain)
    )
    floor = TOKENS**0.5 * torch.finfo(torch.float32).eps / 2
    for kind, a, u, e in zip((torch.float32, dtype, dtype), actual, usual, exact, strict=True):
        assert a.dtype == kind
        error, plain_error = (float((x.double() - e).norm() / e.norm()) for x in (a, u))
        assert error <= 2 * plain_error + floor


def test_the_divisor_of_the_mean_is_not_rounded_to_bf16() -> None:
    """1/1,800 in bf16 would make every gradient a quarter of a percent larger."""
    hidden, weight, labels = inputs(torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    actual = with_gradients(linear_cross_entropy, hidden, weight, labels)
    for a, e in zip(actual, with_gradients(plain, *wide, labels), strict=True):
        assert float((a.double() * e).sum() / e.square().sum()) == pytest.approx(1, abs=5e-4)


def test_a_nearly_certain_token_keeps_its_small_gradient() -> None:
    """p − 1 for a p that rounds to 1 in bf16."""
    hidden, weight = torch.tensor([[7.0]]), torch.tensor([[1.0], [0.0]])
    arguments = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    label = torch.tensor([0])
    actual, expected = (with_gradients(f, *arguments, label) for f in (linear_cross_entropy, plain))
    assert float(expected[1]) != 0
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("label", [-1, -99, VOCABULARY])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    hidden, weight, labels = inputs(torch.float32)
    labels[3] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, labels)


def test_gradients_are_computed_once_and_only_if_needed(chunks: int) -> None:
    """Matrix products: one for the logits, two for the gradients."""
    hidden, weight, labels = inputs(torch.float32, 697)  # which five chunks do not divide

    def multiplied(grad: bool, *tensors: Tensor) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as seen, torch.set_grad_enabled(grad):
            value = linear_cross_entropy(*tensors, labels)
            if value.requires_grad:
                value.backward()
        return sum(event.count for event in seen.key_averages() if event.key == "aten::mm")

    assert multiplied(True, hidden, weight) == 3 * chunks
    assert multiplied(False, hidden, weight) == chunks
    assert multiplied(True, hidden.detach(), weight.detach()) == chunks


def test_autocast_has_no_effect() -> None:
    def results() -> list[Tensor]:
        model, teacher, labels = heads(torch.float32)
        teacher = [x.float() for x in teacher]
        return [
            *with_gradients(linear_cross_entropy, *inputs(torch.float32)),
            *with_gradients(lambda *x: distillation_loss(x[:2], teacher, x[2]), *model, labels),
        ]

    usual = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results()
    torch.testing.assert_close(cast, usual, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(chunks: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(dtype)
    kinds = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(loss_and_gradients, (hidden, weight, labels, True), test_utils=kinds)
    fixed = (hidden.detach(), weight.detach(), labels, False)
    torch.library.opcheck(loss_and_gradients, fixed, test_utils=kinds)


def step(function: Function, dtype: torch.dtype, *sizes: int) -> Callable[[], None]:
    arguments = inputs(dtype, *sizes)
    return lambda: function(*arguments).backward()


def test_peak_memory_excludes_the_float32_logits_of_all_tokens() -> None:
    """And the logits of more than one chunk in any dtype; the plain loss breaks both bounds."""
    measured = spawn_ranks(Path(__file__), ranks=0)
    assert measured.codes(300) == [0], measured.text("err")
    four_chunks, one_chunk, usual = map(int, measured.text("out").split())
    logits = 4 * 2_048 * 8_192
    assert 0 < four_chunks < 0.45 * logits  # one chunk, and the softmax of a few rows
    assert 0 < one_chunk < 0.8 * logits  # bf16, and the softmax of a few rows
    assert usual > 2 * logits


def heads(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor], Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = [(90, 12), (50, 12), (90, 24), (50, 24)]
    drawn = [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]
    labels = torch.randint(50, (90,), generator=draw)
    labels[::7] = -100
    return [x.requires_grad_() for x in drawn[:2]], drawn[2:], labels


def plain_kl(model: list[Tensor], teacher: list[Tensor], labels: Tensor) -> Tensor:
    log_p, log_t = (F.log_softmax(F.linear(*head), -1) for head in (model, teacher))
    kl = F.kl_div(log_p, log_t, reduction="none", log_target=True).sum(-1)
    return kl[labels != -100].mean()


@pytest.mark.parametrize("number", [1, 5])
def test_distillation_and_its_gradients_equal_pytorchs(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS_CPU", 4 * 90 * 50 // number)
    model, teacher, labels = heads()
    expected, actual = (f(model, teacher, labels) for f in (plain_kl, distillation_loss))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x / 3, model) for x in (actual, expected)))


def test_in_bf16_distillation_loses_no_more_than_pytorchs() -> None:
    exact = plain_kl(*heads())
    model, teacher, labels = heads(torch.bfloat16)
    theirs = plain_kl([x.float() for x in model], [x.float() for x in teacher], labels)
    ours = distillation_loss(model, teacher, labels)
    assert (ours - exact).abs() <= 2 * (theirs - exact).abs() + 0.01 * exact
    assert ours.dtype == torch.float32


def test_distillation_without_labels_is_0_without_a_gradient() -> None:
    model, teacher, labels = heads()
    value = distillation_loss(model, teacher, torch.full_like(labels, -100))
    assert value == 0
    assert not any(x.any() for x in torch.autograd.grad(value, model))
    with Calls() as recorded:
        distillation_loss([x.detach() for x in model], teacher, labels)
    assert "mm.out" not in recorded.names, "a gradient that nothing needs"


def test_divergence_of_known_distributions() -> None:
    """The losses of the second token, and KL((½, ½) ‖ (¼, ¾)); nothing for an ignored label."""
    one = torch.ones(2, 1)
    half, quarter = (torch.tensor([p]).log().T.contiguous() for p in ([0.5, 0.5], [0.25, 0.75]))
    labels = torch.tensor([1, -100])
    rows = token_divergence((one, quarter), (one, half), labels).tolist()
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert rows[0] == pytest.approx([math.log(4 / 3), math.log(2), kl, 0])
    assert rows[1] == [0, 0, 0, 0]
    rows = token_divergence((one, quarter), (one, quarter), labels).tolist()
    assert rows == [pytest.approx([math.log(4 / 3)] * 2 + [0, 1]), [0, 0, 0, 0]]


def test_the_model_adds_the_teachers_gradient_and_keeps_the_losss_value() -> None:
    model, teacher = build(tiny("pool")), build(tiny("dense"), seed=1).requires_grad_(False)
    ids, labels = tokens(30), tokens(30).roll(-1, 1)
    labels[:, :9] = -100
    head = teacher.hidden(ids).flatten(0, 1), teacher.head_weight
    parameters = list(model.parameters())
    both = model(ids, labels=labels, loss_weight=0.5, teacher=head)
    alone = model(ids, labels=labels, loss_weight=0.5)
    assert torch.equal(both, alone)
    log_p, log_t = (F.log_softmax(x(ids), -1)[labels != -100] for x in (model, teacher))
    kl = (log_t.exp() * (log_t - log_p)).sum(-1).mean()
    expected = torch.autograd.grad(alone + 0.5 * kl, parameters)
    torch.testing.assert_close(torch.autograd.grad(both, parameters), expected)
    assert token_divergence(
        (model.hidden(ids).flatten(0, 1), model.head_weight), head, labels.flatten()
    )[:, 2].sum() == pytest.approx(float(kl.detach() * (labels != -100).sum()))


if __name__ == "__main__":
    for function, dtype, chunk_logits in (
        (linear_cross_entropy, torch.float32, 2**22),
        (linear_cross_entropy, torch.bfloat16, loss.CHUNK_LOGITS_CPU),
        (plain, torch.bfloat16, loss.CHUNK_LOGITS_CPU),
    ):
        loss.CHUNK_LOGITS_CPU = chunk_logits
        print_peak(step(function, dtype, 2_048, 16, 8_192), step(function, dtype, 8, 8, 8))
