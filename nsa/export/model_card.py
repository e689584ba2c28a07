"""Model card: the README.md of an exported model, from its run's records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nsa.engine.config import RunConfig
from nsa.engine.load_run import LoadedRun
from nsa.model.count import parameter_count
from nsa.monitor.artifacts import Row, read_json, read_table
from nsa.report.markdown import plain, table

HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- native-sparse-attention
---

# {name}

{about}
"""
LOADING = """
## Loading

The model's code is in this folder; read it before you trust it. It needs only transformers ≥ 5.0
and torch ≥ 2.8:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)
{tokenizer}```

With the package `nsa` installed, `import nsa` replaces `trust_remote_code=True`, and the code in
this folder is not run.
"""
TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
"""
NO_TOKENIZER = "# The run's tokenizer was not available to the export: AutoTokenizer fails.\n"
PACKAGES = ("torch", "deepspeed", "triton", "transformers", "nsa-m7c")


def model_card(run: LoadedRun) -> str:
    """Return Markdown with the figures that were logged up to the exported step."""
    metrics = read_table(run.folder / "metrics.csv").rows
    rows = [row for row in metrics if run.step is not None and row["step"] <= run.step]
    figures = dict(_figures(run, rows))
    missing = [name for name, value in figures.items() if value is None]
    step = "" if run.step is None else f", step {run.step:,}"
    lines = [
        HEAD.format(name=plain(run.folder.name) + step, about=_about(run.config)),
        "## Figures",
        "",
        *table(("", ""), [(name, value) for name, value in figures.items() if value is not None]),
    ]
    if missing:
        lines += ["", f"Not recorded by the run: {', '.join(missing)}."]
    lines += [
        LOADING.format(folder="FOLDER", tokenizer=TOKENIZER if run.tokenizer else NO_TOKENIZER),
        "## Settings",
        "",
        *table(("setting", "value"), _settings(run.config)),
        "",
        "All settings are in `config.yaml`, which a recipe takes as `--config`.",
        "",
        "## Made with",
        "",
        *table(("", ""), _provenance(read_json(run.folder / "env.json"))),
    ]
    return "\n".join(lines) + "\n"


def _about(config: RunConfig) -> str:
    model, attention = config.model, config.model.attention
    kind = "dense causal attention"
    if attention.kind == "nsa":
        named = {"cmp": "compressed", "sel": "selected", "win": "sliding window"}
        branches = ", ".join(named[branch] for branch in attention.branch_names)
        kind = f"Native Sparse Attention (arXiv 2502.11089; branches: {branches})"
    return (
        f"A Llama-like decoder of {parameter_count(model) / 1e6:,.1f}M parameters with {kind}, "
        f"trained on sequences of {config.data.seq_len:,} tokens. It completes text; it is not "
        "instruction-tuned."
    )


def _figures(run: LoadedRun, rows: list[Row]) -> Iterator[tuple[str, str | None]]:
    """Name and value of each figure; None if the run did not record it."""
    total = run.config.train.steps
    yield "steps", None if run.step is None else f"{run.step:,} of {total:,}"
    for name, column, form in (
        ("tokens seen", "tokens", ",.0f"),
        ("training loss (nats a token)", "loss", ".4f"),
        ("held-out loss (nats a token)", "val_loss", ".4f"),
        ("held-out bits per byte", "bits_per_byte", ".4f"),
    ):
        last = next((row for row in reversed(rows) if column in row), None)
        if last is None:
            yield name, None
        else:
            at = "" if last["step"] == run.step else f" (at step {last['step']:,.0f})"
            yield name, f"{last[column]:{form}}{at}"


def _settings(config: RunConfig) -> Iterator[tuple[str, object]]:
    model, data, train = config.model, config.data, config.train
    attention = model.attention
    yield "data.source", data.source if isinstance(data.source, str) else json.dumps(data.source)
    for name in ("subset", "split", "tokenizer", "packing", "seq_len", "held_out"):
        if getattr(data, name) is not None:
            yield f"data.{name}", getattr(data, name)
    for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width"):
        yield f"model.{name}", getattr(model, name)
    yield "attention.kind", attention.kind
    if attention.kind == "nsa":
        for name in ("branches", "compressor", "shared_kv"):
            yield f"attention.{name}", getattr(attention, name)
        for name, value in vars(attention.spec).items():
            yield f"attention.spec.{name}", value
    for name in ("micro_batch", "accumulation", "learning_rate", "weight_decay", "precision"):
        yield f"train.{name}", getattr(train, name)
    yield "train.seed", train.seed


def _provenance(env: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What results depend on; no host names."""
    packages = env.get("packages")
    versions = packages if isinstance(packages, dict) else {}
    facts = {
        "recipe": env.get("recipe"),
        "profile": env.get("profile"),
        "ranks": env.get("world_size"),
        "started": env.get("date"),
        "commit": env.get("git_commit"),
        "Python": env.get("python"),
        **{name: versions.get(name) for name in PACKAGES},
    }
    for name, value in facts.items():
        yield name, "not recorded" if value is None else plain(value)
