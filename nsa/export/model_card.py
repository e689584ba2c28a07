"""Model card: the README.md of an exported model, from its run's records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nsa.engine.config import RunConfig
from nsa.engine.load_run import LoadedRun
from nsa.model.count import parameter_count
from nsa.monitor.artifacts import read_json, read_table
from nsa.report.markdown import plain, table

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- native-sparse-attention
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

All settings are in `config.yaml`, which a recipe takes as `--config`.

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


def _figures(run: LoadedRun) -> Iterator[tuple[str, str | None]]:
    """Yield name and value of each figure; None if the run did not record it."""
    step, metrics = run.step, read_table(run.folder / "metrics.csv").rows
    yield "steps", None if step is None else f"{step:,} of {run.config.train.steps:,}"
    for name, column, form in (
        ("tokens seen", "tokens", ",.0f"),
        ("training loss (nats a token)", "loss", ".4f"),
        ("held-out loss (nats a token)", "val_loss", ".4f"),
        ("held-out bits per byte", "bits_per_byte", ".4f"),
    ):
        rows = [
            row for row in metrics if column in row and step is not None and row["step"] <= step
        ]
        if not rows:
            yield name, None
        else:
            at = "" if rows[-1]["step"] == step else f" (at step {rows[-1]['step']:,.0f})"
            yield name, f"{rows[-1][column]:{form}}{at}"


def _settings(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the settings of the data, the shape of the model and the optimization."""
    attention, sparse = config.model.attention, config.model.attention.kind == "nsa"
    sections: tuple[tuple[str, Any, str], ...] = (
        ("data", config.data, "source subset split tokenizer packing seq_len held_out"),
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
