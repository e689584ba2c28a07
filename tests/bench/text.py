"""`python -m tests.bench text`: does NSA use far text as well as dense attention does?

A small model with the recipe's blocks learns an installed package's Python files in sequences of
2,048 tokens, with several seeds. All are compared on the first 2,048 tokens of files that they have
not seen: by position, and in the last quarter on tokens that repeat a rare one from beyond the
window, which only the selected branch and dense attention can read. Differences are paired by seed.
Finished runs are kept, interrupted ones resumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nsa.bench.ablations import COMMON, Training, add_run_flags, train_variants
from nsa.bench.recipe import recipe_config
from nsa.bench.results import Report
from nsa.data.dataset import open_dataset, open_source
from nsa.data.tokenizer import build_tokenizer, train_tokenizer
from nsa.engine.load_run import load_run
from nsa.model import parameter_count
from nsa.model.loss import token_losses
from nsa.report.markdown import mean_and_range, table
from nsa.report.paired import margin
from nsa.validation import words_of

LENGTH = 2_048
MODELS = {
    "nsa": ("attention.compressor=pool", "attention.selector_loss=1"),
    "mean": ("attention.compressor=mean", "attention.selector_loss=0"),
    "dense": ("attention.kind=dense",),
}
HALF = "half"  # "nsa", dense for the first half of the steps
SETTINGS = (
    *COMMON,
    "train.eval_samples=16",
    f"data.seq_len={LENGTH}",
    "data.held_out=0.05",
    "model.vocab_size=4096",
    "model.layers=2",
    "model.width=128",
    "model.heads=4",
    "model.kv_heads=1",
    "model.head_dim=32",
    "model.mlp_width=352",
    "attention.spec.block_len=32",
    "attention.spec.block_stride=16",
    "attention.spec.select_len=64",
    "attention.spec.select_top=16",
    "attention.spec.window=512",
    "train.micro_batch=1",
    "train.learning_rate=2e-3",
    "train.min_learning_rate=2e-4",
    "train.warmup_steps=100",
)
DOCUMENTS = 128  # evaluated at most
RARE = 0.25  # the rarest ids that together are this share of the tokens evaluated
PLACES = (0, 512, 1_024, 1_536, LENGTH)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_run_flags(parser, "runs/text", steps=2_000, jobs=1)
    add("--source", default="embedded:torch", help="data.source (%(default)s)")
    about = "models to train; the others are compared with the first (%(default)s)"
    names = *MODELS, HALF
    add("--models", type=words_of(*names), default=",".join(names), help=about)


def run(report: Report) -> dict[str, Any]:
    """Train the runs that are not finished, evaluate the finished ones; print the table."""
    flags = report.flags
    tokenizer = flags.runs / "tokenizer"
    common = (
        *SETTINGS, f"data.source={flags.source}", f"data.tokenizer=hf:{tokenizer.absolute()}",
        *flags.set, f"train.steps={flags.steps}",
    )  # fmt: skip
    if not tokenizer.exists():
        config = recipe_config("demo", common)
        source = open_source(config.data, flags.source)
        train_tokenizer(source, config.model.vocab_size, tokenizer)
    half = *MODELS["nsa"], f"train.dense_steps={flags.steps // 2}"
    models = {name: half if name == HALF else MODELS[name] for name in flags.models}
    trainings, failures = train_variants(report, "demo", common, models)
    finished = [training for training in trainings if training.result()]
    documents = evaluated_documents(finished[0]) if finished else torch.empty(0)
    result: dict[str, Any] = {
        "documents": len(documents),
        "parameters": {
            name: parameter_count(recipe_config("demo", (*common, *changes)).model)
            for name, changes in models.items()
        },
        "losses": {
            name: {str(x.seed): losses(x, documents) for x in finished if x.variant == name}
            for name in models
        },
        "failures": failures,
    }
    print("\n".join([*lines(result), *result["failures"]]))
    return result


def evaluated_documents(training: Training) -> Tensor:
    """Return the first LENGTH + 1 tokens of held-out files, longer ones only: [documents, ..]."""
    data = recipe_config(training.profile, training.settings).data
    tokenizer, (source,), rows = build_tokenizer(data), open_dataset(data).sources, list[Tensor]()
    for document in source.documents.read():
        ids = tokenizer.encode(source.division.text_for(document.text, "val"))
        if len(ids) > LENGTH:
            rows.append(torch.tensor(ids[: LENGTH + 1].astype("int64")))
        if len(rows) == DOCUMENTS:
            break
    if not rows:
        raise ValueError(f"--source {source.name}: no held-out file has {LENGTH:,} tokens")
    return torch.stack(rows)


def losses(training: Training, documents: Tensor) -> dict[str, float]:
    """Return a run's mean losses by place; they are kept in its folder."""
    kept = training.folder / "text.json"
    if not kept.exists():
        run = load_run(training.folder, device="cpu", dtype=torch.float32)
        model, window = run.model, run.config.model.attention.spec.window
        with torch.no_grad():
            loss = torch.stack([_document_losses(model, row) for row in documents])
        kept.write_text(json.dumps(_means(loss, documents, window)))
    return dict(json.loads(kept.read_text()))


def _document_losses(model: Any, row: Tensor) -> Tensor:
    return token_losses(model.hidden(row[None, :-1])[0], model.head_weight, row[1:])


def _means(loss: Tensor, documents: Tensor, window: int) -> dict[str, float]:
    means = {"all": loss.mean().item()}
    for first, end in pairwise(PLACES):
        means[f"{first:,} to {end:,}"] = loss[:, first:end].mean().item()
    far = far_repeats(documents, window)
    return means | {"far repeats": loss[far].mean().item(), "repeats": far.sum().item()}


def far_repeats(documents: Tensor, window: int) -> Tensor:
    """Return which labels [documents, T] repeat a rare id that last came before the window.

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
        near = same[:, at - window + 1 :].any(1)
        far[:, at] = rare[labels[:, at]] & same.any(1) & ~near
    return far


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the rows as a Markdown table: means of seeds, and paired differences to the first."""
    names, rows = list(result["losses"]), []
    base = result["losses"][names[0]]
    places = list(next(iter(base.values()), {}))[:-1]
    for name in names:
        runs = result["losses"][name]
        cells = []
        for place in places:
            differences = [runs[seed][place] - base[seed][place] for seed in runs if seed in base]
            cell = mean_and_range([run[place] for run in runs.values()], ".3f")
            if name != names[0] and differences:
                mean = sum(differences) / len(differences)
                cell = f"{cell}; {mean:+.3f} ± {margin(differences):.3f}"
            cells.append(cell)
        rows.append([name, *cells, f"{result['parameters'][name]:,}"])
    return table(["model", *places, "parameters"], rows)
