"""A step's loss: the mean over its labels however they are divided; LossGuard on bad ones."""

import json
import math
import runpy
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F

from nsa.cli import main
from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.data.cache import TokenCache
from nsa.data.dataset import open_dataset
from nsa.engine.build import parameter_groups
from nsa.engine.config import RunConfig, TrainConfig, learning_rate, resolve_config
from nsa.engine.loop import train_step
from nsa.engine.loss_guard import LossGuard
from nsa.engine.process_group import Ranks, RunAborted
from nsa.engine.run_request import TrainState
from nsa.model import LanguageModel
from tests.engine.runs import TINY, ds_config, on_one_rank, on_two_ranks, read_metrics, succeed
from tests.ranks import ROOT

STEPS, BATCH = 2, 8
SETTINGS = [
    *(flag.removeprefix("--set=") for flag in TINY),
    "model.kv_heads=2",
    "data.packing=documents",
    "train.precision=fp32",
    "train.eval_every=0",
    "train.eval_samples=1",
    f"train.steps={STEPS}",
    "monitor.log_every=1",
]
ROUNDING = 2e-6  # relative, of float32 sums in another order


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long documents and runs of one-byte ones, prepared: rows have from 48 to 96 labels.

    A one-byte document is followed by an end of text, after which no label counts.
    """
    folder, random = tmp_path_factory.mktemp("text"), Random(0)
    lines = []
    for _ in range(60):
        lines.append("".join(random.choices("abcdefgh ", k=random.randint(1, 700))))
        lines += ["x"] * random.randint(0, 150)
    text = folder / "uneven.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    flags = ["--source", str(text), "--tokenizer", "byte", "--out", str(folder / "prepared")]
    assert main(["data", "prepare", *flags]) == 0
    return folder / "prepared"


@pytest.fixture(scope="module")
def config(uneven: Path) -> RunConfig:
    recipe = runpy.run_path(str(ROOT / "recipes/m7c.py"))["demo"]()
    return resolve_config(recipe, assignments=[*SETTINGS, f"data.source={uneven}"])


@pytest.fixture(scope="module")
def batches(config: RunConfig) -> list[Batch]:
    """The global batch of each step."""
    cache = TokenCache(open_dataset(config.data), Path("unused"))
    samples = cache.open_samples("train", config.train.seed)
    batches = [samples.batch(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS)]
    for batch in batches:
        counts = (batch.labels.view(4, -1) != IGNORE_INDEX).sum(1)
        assert counts.max() > 1.1 * counts.min(), "a mean of means would pass"
    return batches


@pytest.fixture(scope="module")
def plain(config: RunConfig, batches: list[Batch]) -> dict[str, list[float]]:
    """Losses and gradient norms of a loop in plain PyTorch over all tokens of a step at once."""
    train = config.train
    torch.manual_seed(train.seed)
    model = LanguageModel(config.model)
    groups = parameter_groups(model, train.weight_decay, train.value_rate)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    logged: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train) * group.get("lr_factor", 1.0)
        logits = model(batch.input_ids, cu_seqlens=batch.cu_seqlens)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())  # ignores -100
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad()
        logged["loss"].append(loss.item())
        logged["grad_norm"].append(norm.item())
    return logged


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "accumulation", "zero", "others"),
    [
        (1, 8, 1, "zero1_pcie", []),
        pytest.param(2, 4, 1, "zero1_pcie", [], marks=pytest.mark.full),
        (2, 2, 2, "zero2_pcie", ["model.activation_checkpointing=reentrant"]),
        pytest.param(2, 2, 2, "zero3", [], marks=pytest.mark.full),
        pytest.param(2, 1, 4, "zero0_debug", [], marks=pytest.mark.full),
    ],
)
def test_loss_and_gradient_do_not_depend_on_how_a_step_is_divided(
    ranks: int,
    micro_batch: int,
    accumulation: int,
    zero: str,
    others: list[str],
    uneven: Path,
    plain: dict[str, list[float]],
    tmp_path: Path,
) -> None:
    settings = [*SETTINGS, f"data.source={uneven}", *others]
    settings += [f"train.micro_batch={micro_batch}", f"train.accumulation={accumulation}"]
    flags = [ds_config(zero), "--run-dir=run"]
    flags += [f"--set={setting}" for setting in settings]
    run = on_one_rank if ranks == 1 else on_two_ranks
    succeed(run("m7c.py", *flags, folder=tmp_path))
    rows = read_metrics(tmp_path / "run")
    for column, expected in plain.items():
        if (zero, column) == ("zero0_debug", "grad_norm"):
            continue  # DeepSpeed computes none
        assert [row[column] for row in rows] == pytest.approx(expected, rel=ROUNDING), column


def test_a_step_keeps_no_graph_and_counts_what_it_consumed() -> None:
    phases, weight = list[str](), torch.ones((), requires_grad=True)

    class Engine:
        module = None
        optimizer = SimpleNamespace(param_groups=[{"lr_factor": 0.5}])
        backward = staticmethod(torch.Tensor.backward)
        step = staticmethod(lambda: None)
        was_step_applied = staticmethod(lambda: False)
        losses = iter([1.0, 3.0])

        def __call__(self, *_: object, **__: object) -> torch.Tensor:
            return weight * next(self.losses)

    run: Any = Mock(engine=Engine(), guard=new_guard(), teacher=None, device=torch.device("cpu"))
    run.config = RunConfig(train=TrainConfig(micro_batch=3, accumulation=2))
    run.state, run.ranks = TrainState(step=4, samples=10, skipped=2), Ranks(0, 0, world_size=2)
    run.telemetry.enter = lambda phase, micro_step: phases.append(phase)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    loss = train_step(run, [Batch(ids, ids)] * 2, labels=0)
    assert (loss.item(), loss.requires_grad) == (2.0, False)
    assert phases == ["forward", "backward", "step"] * 2
    assert run.state == TrainState(step=5, samples=22, tokens=12 * 2_048, skipped=3)
    assert run.engine.optimizer.param_groups[0]["lr"] == learning_rate(4, run.config.train) / 2


def new_guard(**settings: Any) -> LossGuard:
    return LossGuard(TrainConfig(**settings), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_good_loss_and_its_gradient_pass_bit_for_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(50, dtype=dtype, requires_grad=True)
    loss = weight.square().mean()
    (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
    checked = new_guard().check(loss)
    (gradient,) = torch.autograd.grad(checked, weight)
    assert torch.equal(checked, loss)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_makes_every_gradient_nan(value: float) -> None:
    """The gradients of an infinite loss may be finite and would be applied."""
    weight = torch.ones(3, requires_grad=True)
    new_guard().check(weight.sum() + value).backward()
    assert weight.grad is not None
    assert weight.grad.isnan().all()


def handle_skipped_step(guard: LossGuard, messages: list[str]) -> None:
    """Let a run of one rank recover from its step 7."""
    one_rank: Any = SimpleNamespace(gather=lambda value, kind: [value])
    guard.handle_skipped_step(7, one_rank, messages.append)


def test_more_bad_steps_than_the_budget_end_the_run() -> None:
    messages: list[str] = []
    guard = new_guard()
    for _ in range(20):
        guard.check(torch.tensor(math.nan))
        handle_skipped_step(guard, messages)
    cause = "step 7: a loss is not finite on rank 0"
    assert messages == [f"{cause}; step skipped ({n} of at most 20)" for n in range(1, 21)]
    last = "step 7: a gradient is not finite; 21 bad steps since launch, more than 20"
    with pytest.raises(RunAborted, match=last):
        handle_skipped_step(guard, messages)


@pytest.mark.parametrize(
    ("losses", "cause"),
    [([], "a gradient is not finite"), ([math.nan], "a loss is not finite on rank 0")],
)
def test_the_cause_is_named_and_abort_ends_the_run_at_the_first_bad_step(
    losses: list[float], cause: str
) -> None:
    messages: list[str] = []
    guard = new_guard(on_bad_step="abort")
    for loss in (3.0, *losses):
        guard.check(torch.tensor(loss))
    with pytest.raises(RunAborted, match="before updating the weights") as aborted:
        handle_skipped_step(guard, messages)
    assert str(aborted.value).startswith(f"step 7: {cause}; train.on_bad_step = abort")
    assert messages == []


def test_a_gradient_that_overflows_in_fp16_is_no_bad_step() -> None:
    """DeepSpeed lowers the loss scale, many times in the first steps."""
    messages: list[str] = []
    guard = new_guard(precision="fp16", on_bad_step="abort")
    handle_skipped_step(guard, messages)
    assert (guard.bad_steps, messages) == (0, [])
    guard.check(torch.tensor(math.nan))
    with pytest.raises(RunAborted, match="a loss is not finite"):
        handle_skipped_step(guard, messages)
