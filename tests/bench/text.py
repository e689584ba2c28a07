"""`python -m tests.bench text`: does NSA use far text as well as dense attention does?

A small model with the recipe's blocks learns an installed package's Python files in sequences of
2,048 tokens, with several seeds. All are compared on the first 2,048 tokens of files that they have
not seen: by position, and in the last quarter on tokens that repeat a rare one from beyond the
window, which only the selected branch and dense attention can read. Differences are paired by seed.
Finished runs are kept, interrupted ones resumed.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset, open_source
from nsa.data.tokenizer import build_tokenizer, train_tokenizer
from nsa.engine.config import RunConfig, resolve_config
from nsa.engine.load_run import load_run
from nsa.model import parameter_count
from nsa.system import resource_path
from nsa.text import markdown_table
from tests.bench.harness import Report, margin, mean_losses, words_of
from tests.bench.runs import document_losses, kept, train_run

RECIPE = resource_path("recipes/m7c.py")
LENGTH = 2_048
NEAR = 512  # tokens back: M7C's last blocks, and the paper's window
BRANCHES = (  # the paper's three
    "attention.branches=cmp+sel+win",
    "attention.spec.block_len=32",
    "attention.spec.block_stride=16",
    "attention.spec.select_top=16",
    f"attention.spec.window={NEAR}",
)
INDEX = (  # one set of keys and values
    "attention.spec.block_len=64",
    "attention.spec.block_stride=64",
    "attention.spec.select_top=22",
    "attention.spec.local_blocks=8",
)
SETTINGS = (  # of the recipe's demo
    "train.eval_every=0",  # evaluate at the end only
    "train.eval_samples=16",
    "train.dense_steps=0",
    "checkpoint.keep=1",
    "data.source=embedded:torch",
    f"data.seq_len={LENGTH}",
    "data.held_out=0.05",
    "model.vocab_size=4096",
    "model.layers=2",
    "model.width=128",
    "model.heads=4",
    "model.kv_heads=1",
    "model.head_dim=32",
    "model.mlp_width=352",
    "attention.spec.select_len=64",
    "train.micro_batch=1",
    "train.learning_rate=2e-3",
    "train.min_learning_rate=2e-4",
    "train.warmup_steps=100",
)
DOCUMENTS = 128  # evaluated at most
RARE = 0.25  # the rarest ids that together are this share of the tokens evaluated
PLACES = (0, 512, 1_024, 1_536, LENGTH)


def models(steps: int) -> dict[str, tuple[str, ...]]:
    """Return the settings of each model, of which one is dense for half of the steps."""
    return {
        "nsa": (*BRANCHES, "attention.compressor=pool", "attention.selector_loss=1"),
        "mean": (*BRANCHES, "attention.compressor=mean", "attention.selector_loss=0"),
        "dense": ("attention.kind=dense",),
        "half index": (*INDEX, f"train.dense_steps={steps // 2}"),
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=Path, default="runs/text", help="folder of the runs (%(default)s)")
    add("--steps", type=int, default=2_000, help="per run (%(default)s)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of weights and data (1 2 3)")
    about = "a setting of every run; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    about = "models to train; the others are compared with the first (%(default)s)"
    add("--models", type=words_of(*models(0)), default=",".join(models(0)), help=about)


def run(report: Report) -> dict[str, Any]:
    """Train the runs that are not finished, evaluate all; print the table."""
    flags = report.flags
    tokenizer = flags.runs / "tokenizer"
    common = (
        *SETTINGS, f"data.tokenizer=hf:{tokenizer.absolute()}",
        *flags.set, f"train.steps={flags.steps}",
    )  # fmt: skip
    if not tokenizer.exists():
        config = demo_config(common)
        source = open_source(config.data, str(config.data.source))
        train_tokenizer(source, config.model.vocab_size, tokenizer)
    changes = {name: models(flags.steps)[name] for name in flags.models}
    settings = {
        flags.runs / f"{name}-seed{seed}": (*common, f"train.seed={seed}", *changes[name])
        for seed in flags.seeds
        for name in changes
    }
    for folder, own in settings.items():
        check(folder, own)
    for folder, own in settings.items():
        train_run(RECIPE, "demo", folder, flags.steps, own, OMP_NUM_THREADS="1")
    documents = evaluated_documents(demo_config(common).data)
    result: dict[str, Any] = {
        "documents": len(documents),
        "parameters": {
            name: parameter_count(demo_config((*common, *changes[name])).model) for name in changes
        },
        "losses": {
            name: {
                str(seed): losses(flags.runs / f"{name}-seed{seed}", documents)
                for seed in flags.seeds
            }
            for name in changes
        },
    }
    print(*lines(result), sep="\n")
    return result


def check(folder: Path, settings: Sequence[str]) -> None:
    """Raise if the folder has a run with other settings."""
    file, config = folder / "config.yaml", demo_config(settings)
    if file.exists() and resolve_config(config, file) != config:
        raise ValueError(
            f"--runs {folder.parent}: {file} has different settings from this command; "
            "choose another folder, or the --steps of that run"
        )


def demo_config(settings: Sequence[str]) -> RunConfig:
    """Return the recipe's demo with these settings."""
    return resolve_config(runpy.run_path(str(RECIPE))["demo"](), assignments=list(settings))


def evaluated_documents(data: DataConfig) -> Tensor:
    """Return the first LENGTH + 1 tokens of held-out files, longer ones only: [documents, ..]."""
    tokenizer, (source,), rows = build_tokenizer(data), open_dataset(data).sources, list[Tensor]()
    for document in source.documents.read_all():
        ids = tokenizer.encode(source.division.text_for(document.text, "val"))
        if len(ids) > LENGTH:
            rows.append(torch.tensor(ids[: LENGTH + 1].astype("int64")))
        if len(rows) == DOCUMENTS:
            break
    if not rows:
        raise ValueError(f"{source.name}: no held-out file has {LENGTH:,} tokens")
    return torch.stack(rows)


def losses(folder: Path, documents: Tensor) -> dict[str, float]:
    """Return a run's mean losses by place; they are kept in its folder."""

    @torch.no_grad()
    def measure() -> dict[str, Any]:
        model = load_run(folder, device="cpu", dtype=torch.float32).model
        loss = torch.stack([document_losses(model, row) for row in documents])
        far = far_repeats(documents)
        repeats = {"far repeats": loss[far].mean().item(), "repeats": far.sum().item()}
        return mean_losses(loss, PLACES) | repeats

    return kept(folder / "text.json", measure)


def far_repeats(documents: Tensor) -> Tensor:
    """Return which labels [documents, T] repeat a rare id that last came over NEAR tokens before.

    Only those in the last quarter count.
    """
    count = torch.bincount(documents.flatten())
    order = count.argsort()
    rare = torch.zeros(len(count), dtype=torch.bool)
    rare[order[count[order].cumsum(0) <= RARE * count.sum()]] = True
    labels = documents[:, 1:]
    far = torch.zeros_like(labels, dtype=torch.bool)
    for at in range(PLACES[-2], labels.shape[1]):
        same = documents[:, : at + 1] == labels[:, at : at + 1]
        near = same[:, at - NEAR + 1 :].any(1)
        far[:, at] = rare[labels[:, at]] & same.any(1) & ~near
    return far


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the rows as a Markdown table: means of seeds, and paired differences to the first."""
    names, rows = list(result["losses"]), []
    base = result["losses"][names[0]]
    places = [*mean_losses(torch.zeros(LENGTH), PLACES), "far repeats"]
    for name in names:
        runs, cells = result["losses"][name], []
        for place in places:
            text = f"{fmean(run[place] for run in runs.values()):.3f}"
            if name != names[0]:
                differences = [runs[seed][place] - base[seed][place] for seed in runs]
                text += f"; {fmean(differences):+.3f} ± {margin(differences):.3f}"
            cells.append(text)
        rows.append([name, *cells, f"{result['parameters'][name]:,}"])
    return markdown_table(["model", *places, "parameters"], rows)
