"""The loss of a step is the mean over its labels, however ranks and micro-batches divide it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from random import Random

import pytest
import torch
from torch.nn import functional as F

from nsa.cli import main
from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.data.cache import TokenCache
from nsa.data.dataset import open_dataset
from nsa.engine.build import parameter_groups
from nsa.engine.config import RunConfig, learning_rate, resolve_config
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
