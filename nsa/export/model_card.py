"""Model card: the README.md of an exported model, from its run's records.

The Hub reads the metadata between the two `---`. A local file or folder is named without its path.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCardData

from nsa.data.config import DataConfig
from nsa.data.hub import FINEWEB_EDU
from nsa.data.shards import is_prepared, read_index
from nsa.data.source import is_path
from nsa.engine.load_run import StoredRun
from nsa.export.origin import Origin
from nsa.model.config import AttentionConfig
from nsa.model.count import parameter_count
from nsa.monitor.artifacts import read_json, read_table
from nsa.text import markdown_table, plain

CARD = """\
---
{metadata}
---

# {title}

{about}
{training}
Before you publish this folder: {license_note}.
{loading}"""
LOADING = """
All settings are in `config.yaml`, which a recipe takes as `--config`; check it for local paths.

## Loading

The model's code is in this folder; read it before you trust it. It needs only transformers ≥ 5.0
and torch ≥ 2.8:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
{tokenizer}```

With the package `nsa` installed, `import nsa.model.hf` replaces `trust_remote_code=True`, and the
code in this folder is not run.

## Serving

`nsa serve FOLDER` answers OpenAI's chat completions and completions over HTTP. vLLM and llama.cpp
have attention of their own and refuse this folder{servers}.
"""
TO_SERVERS = "; they serve what `nsa export --attention dense` writes"
DENSE = """
This is a plain dense model: transformers ≥ 5.0 loads it by `AutoModelForCausalLM.from_pretrained`
without other code, and vLLM, llama.cpp and `nsa serve` serve it.
"""
TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
"""
NO_TOKENIZER = "# No tokenizer files: the run's tokenizer was not available to the export.\n"
FIGURES = {  # label: column of metrics.csv, format
    "tokens seen": ("tokens", ",.0f"),
    "training loss (nats per token)": ("loss", ".4f"),
    "validation loss (nats per token)": ("val_loss", ".4f"),
    "validation bits per byte": ("bits_per_byte", ".4f"),
}
RECORDED = (  # in env.json
    *("recipe", "profile", "world_size", "date", "git_commit", "python"),
    *("torch", "deepspeed", "triton", "transformers", "nsa-m7c"),
)


def model_card(run: StoredRun, origin: Origin | None = None, dense: bool = False) -> str:
    """Return Markdown with the figures that were logged up to the exported step.

    An import, or an export of an export, has no step, and no figures of a training.
    """
    sources = _sources(run.config.data) if run.step is not None else []
    title = plain(run.folder.name) + ("" if run.step is None else f", step {run.step:,}")
    note = "the license at the top is the code's, and the dataset may require another"
    if origin is not None:
        note = f"the license at the top is that of {plain(origin.name)}"
        if not origin.license:
            note = f"state the license of {plain(origin.name)} at the top"
    attention = run.config.model.attention
    loading = DENSE if dense else LOADING
    has_dense_export = attention.kind == "dense" or attention.has_index
    return CARD.format(
        metadata=_metadata(run, sources, origin, dense).to_yaml(),
        title=title,
        about=_about(run, origin, dense),
        training=_training(run, sources),
        license_note=note,
        loading=loading.format(
            tokenizer=TOKENIZER if run.tokenizer else NO_TOKENIZER,
            servers=TO_SERVERS if has_dense_export else "",
        ),
    )


def _about(run: StoredRun, origin: Origin | None, dense: bool) -> str:
    model, attention = run.config.model, run.config.model.attention
    if dense or attention.kind == "dense":
        kind = "dense causal attention"
        if attention.has_index and run.step is not None:
            kind += " (training and the figures below: sparse attention)"
    elif attention.has_index:
        kind = "sparse attention: an index selects the blocks of tokens that a query attends to"
    else:
        names = {"cmp": "compressed", "sel": "selected", "win": "sliding window"}
        branches = ", ".join(names[branch] for branch in attention.branch_names)
        kind = f"Native Sparse Attention (arXiv 2502.11089; branches: {branches})"
    count = parameter_count(replace(model, attention=AttentionConfig("dense")) if dense else model)
    about = f"A Llama-like decoder of {count / 1e6:,.1f}M parameters with {kind}"
    if run.step is not None:
        about += f", trained on sequences of {run.config.data.seq_len:,} tokens"
    if origin is None:
        return f"{about}. It completes text; it is not instruction-tuned."
    license = plain(origin.license) if origin.license else "not recorded"
    return f"{about}. Its weights come from {plain(origin.name)}, whose license is {license}."


def _metadata(
    run: StoredRun, sources: list[str], origin: Origin | None, dense: bool
) -> ModelCardData:
    """Return license, tags, and the datasets on the Hub."""
    ids = [name.removeprefix("hf:") for name in sources if name.startswith("hf:")]
    if "fineweb_edu" in sources:
        ids.append(FINEWEB_EDU[0])
    sparse = run.config.model.attention.kind == "nsa" and not dense
    return ModelCardData(
        license="apache-2.0" if origin is None else (origin.license or "other"),
        base_model=origin.name if origin is not None and "/" in origin.name else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["native-sparse-attention"] if sparse else None,
        datasets=ids or None,
    )


def _training(run: StoredRun, sources: list[str]) -> str:
    """Return the table of the run's datasets, figures and versions; nothing without a step."""
    if run.step is None:
        return ""
    facts: list[tuple[str, object]] = [
        ("dataset", ", ".join(sources)),
        ("steps", f"{run.step:,} of {run.config.train.steps:,}"),
    ]
    rows = [row for row in read_table(run.folder / "metrics.csv").rows if row["step"] <= run.step]
    latest = {column: row for row in rows for column in row}  # by column, the last row with it
    for name, (column, form) in FIGURES.items():
        if row := latest.get(column):
            facts.append((name, f"{row[column]:{form}} (step {row['step']:,.0f})"))
    env = read_json(run.folder / "env.json")
    recorded = env | (env.get("packages") or {})
    facts += [(name, recorded[name]) for name in RECORDED if recorded.get(name) is not None]
    return "\n".join(["", "## Training", "", *markdown_table(("", ""), facts), ""])


def _sources(data: DataConfig) -> list[str]:
    """Return the data's sources without local paths; a prepared folder counts as its source."""
    names = []
    for name in data.sources():
        if is_prepared(name):
            name = read_index(name).stamp.source
        path = Path(name.removeprefix("hf:"))  # earlier versions read hf:<folder>
        local = is_path(name) or path.is_absolute() or name.startswith(("hf:.", "hf:~"))
        names.append(f"{path.name} (local)" if local else name)
    return names
