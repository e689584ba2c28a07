"""Model card: the README.md of an exported model, from its run's records.

Its metadata (between the ---) is what the Hub reads: license, language, datasets and figures. No
local path is written: of a local file or folder only its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from nsa.data.config import DataConfig
from nsa.data.hub import FINEWEB_EDU
from nsa.data.shards import is_prepared, read_index
from nsa.data.source import is_path
from nsa.engine.config import RunConfig
from nsa.engine.load_run import LoadedRun
from nsa.model.count import parameter_count
from nsa.monitor.artifacts import read_json, read_table
from nsa.report.markdown import plain, table

CARD = """\
---
{metadata}
---

# {title}

{about}

## Figures

{figures}

## Loading

The model's code is in this folder; read it before you trust it. It needs only transformers ≥ 5.0
and torch ≥ 2.8:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
{tokenizer}```

With the package `nsa` installed, `import nsa` replaces `trust_remote_code=True`, and the code in
this folder is not run.

## Settings

{settings}

All settings are in `config.yaml`, which a recipe takes as `--config`. Before you publish this
folder, see which local paths that file names, and check the license at the top: it is the code's,
and the dataset may ask for another.

## Made with

{provenance}
"""
TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
"""
NO_TOKENIZER = "# The run's tokenizer was not available to the export: AutoTokenizer fails.\n"
ENVIRONMENT = {  # label: key in env.json
    "recipe": "recipe",
    "profile": "profile",
    "ranks": "world_size",
    "started": "date",
    "commit": "git_commit",
    "Python": "python",
}
LANGUAGES = {"fineweb_edu": "en", "embedded": "code"}  # of sources; a language is not guessed
PACKAGES = ("torch", "deepspeed", "triton", "transformers", "nsa-m7c")


def model_card(run: LoadedRun) -> str:
    """Return Markdown with the figures that were logged up to the exported step."""
    figures = dict(_figures(run))
    recorded = [(name, value) for name, value in figures.items() if value is not None]
    missing = ", ".join(name for name, value in figures.items() if value is None)
    step = "" if run.step is None else f", step {run.step:,}"
    env = read_json(run.folder / "env.json")
    facts = {label: env.get(key) for label, key in ENVIRONMENT.items()}
    facts |= {name: (env.get("packages") or {}).get(name) for name in PACKAGES}
    provenance = [(k, "not recorded" if value is None else value) for k, value in facts.items()]
    return CARD.format(
        metadata=_metadata(run).to_yaml(),
        title=plain(run.folder.name) + step,
        about=_about(run.config),
        figures="\n".join(table(("", ""), recorded))
        + (f"\n\nNot recorded by the run: {missing}." if missing else ""),
        tokenizer=TOKENIZER if run.tokenizer else NO_TOKENIZER,
        settings="\n".join(table(("setting", "value"), _settings(run.config))),
        provenance="\n".join(table(("", ""), provenance)),
    )


def _about(config: RunConfig) -> str:
    model, attention = config.model, config.model.attention
    kind = "dense causal attention"
    if attention.kind == "nsa":
        names = {"cmp": "compressed", "sel": "selected", "win": "sliding window"}
        branches = ", ".join(names[branch] for branch in attention.branch_names)
        kind = f"Native Sparse Attention (arXiv 2502.11089; branches: {branches})"
    return (
        f"A Llama-like decoder of {parameter_count(model) / 1e6:,.1f}M parameters with {kind}, "
        f"trained on sequences of {config.data.seq_len:,} tokens. It completes text; it is not "
        "instruction-tuned."
    )


def _metadata(run: LoadedRun) -> ModelCardData:
    """Return the card's metadata, with held-out figures as the Hub's model-index."""
    names = _source_names(run.config.data)
    ids = [FINEWEB_EDU[0] if name == "fineweb_edu" else name.removeprefix("hf:") for name in names]
    hub = [id for id, name in zip(ids, names, strict=True) if _local(name) is None and "/" in id]
    kinds = [name.partition(":")[0] for name in names]
    languages = [LANGUAGES[kind] for kind in kinds if kind in LANGUAGES]
    results = []
    for kind, column, value in (
        ("perplexity", "val_loss", math.exp),
        ("bits_per_byte", "bits_per_byte", float),
    ):
        row = _latest(run, column)
        if row is not None:
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=hub[0] if len(names) == len(hub) == 1 else "custom",
                    dataset_name=", ".join(_public(name) for name in names),
                    dataset_split="held out from training",
                    metric_type=kind,
                    metric_value=round(value(row[column]), 4),
                    metric_name=f"{kind.replace('_', ' ')} at step {row['step']:.0f}",
                )
            )
    return ModelCardData(
        license="apache-2.0",
        language=[*dict.fromkeys(languages)] if len(languages) == len(names) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["native-sparse-attention"],
        datasets=hub or None,
        metrics=[result.metric_type for result in results] or None,
        model_name=plain(run.folder.name) if results else None,
        eval_results=results or None,
    )


def _source_names(data: DataConfig) -> list[str]:
    """Return the data's sources; of a prepared folder, what it was prepared from."""
    return [
        read_index(Path(name).expanduser()).stamp.source if is_prepared(name) else name
        for name in data.sources()
    ]


def _local(name: str) -> Path | None:
    """Return the local path in a source's or tokenizer's name, if it is one."""
    path = Path(name.removeprefix("hf:")).expanduser()
    hub = name.startswith("hf:") and not path.is_absolute() and not path.exists()
    return path if not hub and (name.startswith("hf:") or is_path(name)) else None


def _public(name: str) -> str:
    path = _local(name)
    return name if path is None else f"{path.name} (local)"


def _latest(run: LoadedRun, column: str) -> dict[str, float] | None:
    """Return the last row of metrics.csv with this column, up to the exported step."""
    metrics = read_table(run.folder / "metrics.csv").rows
    rows = [row for row in metrics if column in row and row["step"] <= (run.step or -1)]
    return rows[-1] if rows else None


def _figures(run: LoadedRun) -> Iterator[tuple[str, str | None]]:
    """Yield name and value of each figure; None if the run did not record it."""
    step = run.step
    yield "steps", None if step is None else f"{step:,} of {run.config.train.steps:,}"
    for name, column, form in (
        ("tokens seen", "tokens", ",.0f"),
        ("training loss (nats a token)", "loss", ".4f"),
        ("held-out loss (nats a token)", "val_loss", ".4f"),
        ("held-out bits per byte", "bits_per_byte", ".4f"),
    ):
        row = _latest(run, column)
        if row is None:
            yield name, None
        else:
            at = "" if row["step"] == step else f" (at step {row['step']:,.0f})"
            yield name, f"{row[column]:{form}}{at}"


def _settings(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the settings of the data, the shape of the model and the optimization."""
    attention, sparse = config.model.attention, config.model.attention.kind == "nsa"
    weights = {_public(name): weight for name, weight in config.data.sources().items()}
    source = weights if len(weights) > 1 else next(iter(weights))
    tokenizer = config.data.tokenizer
    tokenizer = tokenizer if tokenizer == "byte" else _public(tokenizer)
    data = replace(config.data, source=source, tokenizer=tokenizer)
    sections: tuple[tuple[str, Any, str], ...] = (
        ("data", data, "source subset split tokenizer packing seq_len held_out"),
        ("model", config.model, "vocab_size layers width heads kv_heads head_dim mlp_width"),
        ("attention", attention, "kind" + " branches compressor shared_kv" * sparse),
        ("attention.spec", attention.spec, " ".join(vars(attention.spec)) * sparse),
        (
            "train",
            config.train,
            "micro_batch accumulation learning_rate weight_decay precision seed",
        ),
    )
    for section, values, names in sections:
        for name in names.split():
            if getattr(values, name) is not None:
                yield f"{section}.{name}", getattr(values, name)
