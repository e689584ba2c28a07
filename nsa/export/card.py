"""The README.md of an exported model: what its run has written down, and what it has not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.model.count import parameter_count
from nsa.monitor.artifacts import Row, read_json, read_table
from nsa.report.markdown import plain, table

if TYPE_CHECKING:
    from nsa.engine.config import RunConfig
    from nsa.engine.load_run import LoadedRun

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

The code is in this folder; read it before you trust it. Nothing but transformers ≥ 5.0 and
torch ≥ 2.8 is needed:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)
{tokenizer}```

Where the package `nsa` is installed, `import nsa` takes the place of `trust_remote_code=True`, and
the code in this folder is not run.
"""
TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
"""
NO_TOKENIZER = (
    "# The run's tokenizer could not be had when this was written: AutoTokenizer fails.\n"
)
PACKAGES = ("torch", "deepspeed", "triton", "transformers", "nsa-m7c")


def card(run: LoadedRun, folder: str = "FOLDER") -> str:
    """Markdown, with the figures of the step that the weights are from; none is made up."""
    run_dir = run.folder
    env, rows = read_json(run_dir / "env.json"), _rows(run_dir, run.step)
    figures = list(_figures(run, rows))
    missing = [name for name, value in figures if value is None]
    lines = [
        HEAD.format(name=_name(run_dir, run.step), about=_about(run.config)),
        "## Figures",
        "",
        *table(("", ""), [(name, value) for name, value in figures if value is not None]),
    ]
    if missing:
        lines += ["", f"Not recorded by the run: {', '.join(missing)}."]
    tokenizer = (TOKENIZER if run.tokenizer else NO_TOKENIZER).replace("{folder}", folder)
    lines += [
        LOADING.format(folder=folder, tokenizer=tokenizer),
        "## Settings",
        "",
        *table(("setting", "value"), _settings(run.config)),
        "",
        "All of them are in `config.yaml`, which a recipe takes as `--config`.",
        "",
        "## Made with",
        "",
        *table(("", ""), _made_with(env)),
    ]
    return "\n".join(lines) + "\n"


def _name(run_dir: Path, step: int | None) -> str:
    return plain(run_dir.name) + ("" if step is None else f", step {step:,}")


def _about(config: RunConfig) -> str:
    model, attention = config.model, config.model.attention
    kind = "dense causal attention"
    if attention.kind == "nsa":
        named = {"cmp": "compressed", "sel": "selected", "win": "sliding window"}
        branches = ", ".join(named[branch] for branch in attention.branch_names)
        kind = f"Native Sparse Attention (arXiv 2502.11089; branches: {branches})"
    return (
        f"A Llama-like decoder of {parameter_count(model) / 1e6:,.1f}M parameters with {kind}, "
        f"trained on sequences of {config.data.seq_len:,} tokens. It completes text and has "
        "learned no instructions."
    )


def _rows(run_dir: Path, step: int | None) -> list[Row]:
    """What was logged up to the step of the weights."""
    rows = read_table(run_dir / "metrics.csv").rows
    return [row for row in rows if step is not None and row["step"] <= step]


def _figures(run: LoadedRun, rows: list[Row]) -> Iterator[tuple[str, str | None]]:
    """Each with None where the run has not written it down."""
    total = run.config.train.steps
    yield "steps", None if run.step is None else f"{run.step:,} of {total:,}"
    for name, column, form in (
        ("tokens seen", "tokens", ",.0f"),
        ("training loss (nats a token)", "loss", ".4f"),
        ("held-out loss (nats a token)", "val_loss", ".4f"),
        ("held-out bits per byte", "bits_per_byte", ".4f"),
    ):
        found = [row for row in rows if column in row]
        if not found:
            yield name, None
            continue
        last = found[-1]
        at = "" if last["step"] == run.step else f" (at step {last['step']:,.0f})"
        yield name, f"{last[column]:{form}}{at}"


def _settings(config: RunConfig) -> Iterator[tuple[str, object]]:
    model, data, train = config.model, config.data, config.train
    attention = model.attention
    yield "data.source", data.source if isinstance(data.source, str) else json.dumps(data.source)
    for name in ("subset", "split", "tokenizer", "packing", "seq_len", "held_out"):
        value = getattr(data, name)
        if value is not None:
            yield f"data.{name}", value
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


def _made_with(env: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Of the machine only what results depend on: names of hosts stay at home."""
    packages = env.get("packages")
    known = packages if isinstance(packages, dict) else {}
    facts = {
        "recipe": env.get("recipe"),
        "profile": env.get("profile"),
        "ranks": env.get("world_size"),
        "begun": env.get("date"),
        "commit": env.get("git_commit"),
        "Python": env.get("python"),
        **{name: known.get(name) for name in PACKAGES},
    }
    for name, value in facts.items():
        yield name, "not recorded" if value is None else plain(value)
