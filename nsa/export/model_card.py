"""Model card: the README.md of an exported model, from its run's records.

The Hub reads its metadata, between the ---: license, language, datasets and validation figures. No
local path is written: of a local file or folder only its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from nsa.data.config import DataConfig
from nsa.data.hub import FINEWEB_EDU
from nsa.data.shards import is_prepared, read_index
from nsa.data.source import is_path
from nsa.engine.config import RunConfig
from nsa.engine.load_run import LoadedRun
from nsa.evaluate.perplexity import perplexity
from nsa.export.origin import Origin
from nsa.model.count import parameter_count
from nsa.monitor.artifacts import read_json, read_table
from nsa.report.markdown import plain, table

CARD = """\
---
{metadata}
---

# {title}

{about}

## Training

{facts}
"""
LOADING = """
All settings are in `config.yaml`, which a recipe takes as `--config`. Before you publish this
folder, check that file for local paths, and the license at the top: it is the code's, and the
dataset may require another.

## Loading

The model's code is in this folder; read it before you trust it. It needs only transformers ≥ 5.0
and torch ≥ 2.8:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
{tokenizer}```

With the package `nsa` installed, `import nsa.model.hf` replaces `trust_remote_code=True`, and the
code in this folder is not run.
"""
LLAMA = """
Before you publish this folder, check the license at the top. This is a plain Llama: transformers
≥ 5.0 loads it by `AutoModelForCausalLM.from_pretrained` without other code.
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
LANGUAGES = {"fineweb_edu": "en", "embedded": "code"}  # by source; others have none
RECORDED = (  # in env.json
    *("recipe", "profile", "world_size", "date", "git_commit", "python"),
    *("torch", "deepspeed", "triton", "transformers", "nsa-m7c"),
)


def model_card(run: LoadedRun, origin: Origin | None = None, llama: bool = False) -> str:
    """Return Markdown with the figures that were logged up to the exported step."""
    names = _source_names(run.config.data)
    latest = _last_rows(run)
    facts = [("dataset", ", ".join(_without_path(name) for name in names)), *_facts(run, latest)]
    step = "" if run.step is None else f", step {run.step:,}"
    loading = LLAMA if llama else LOADING
    return CARD.format(
        metadata=_metadata(run, names, latest, origin).to_yaml(),
        title=plain(run.folder.name) + step,
        about=_about(run.config, origin),
        facts="\n".join(table(("", ""), facts)),
    ) + loading.format(tokenizer=TOKENIZER if run.tokenizer else NO_TOKENIZER)


def _about(config: RunConfig, origin: Origin | None) -> str:
    model, attention = config.model, config.model.attention
    kind = "dense causal attention"
    if attention.kind == "nsa":
        names = {"cmp": "compressed", "sel": "selected", "win": "sliding window"}
        branches = ", ".join(names[branch] for branch in attention.branch_names)
        kind = f"Native Sparse Attention (arXiv 2502.11089; branches: {branches})"
    return (
        f"A Llama-like decoder of {parameter_count(model) / 1e6:,.1f}M parameters with {kind}, "
        f"trained on sequences of {config.data.seq_len:,} tokens. "
        + ("It completes text; it is not instruction-tuned." if origin is None else _from(origin))
    )


def _from(origin: Origin) -> str:
    license = origin["license"]
    stated = f"whose license is {plain(license)}" if license else "whose license is not recorded"
    return f"Its weights come from {plain(origin['name'])}, {stated}."


def _metadata(
    run: LoadedRun,
    names: list[str],
    latest: dict[str, dict[str, float]],
    origin: Origin | None,
) -> ModelCardData:
    """Return license, tags, languages, the datasets on the Hub, and figures as its model-index."""
    public = [name for name in names if _local_path(name) is None]
    ids = [FINEWEB_EDU[0] if name == "fineweb_edu" else name.removeprefix("hf:") for name in public]
    hub = [id for id in ids if "/" in id]
    kinds = [name.partition(":")[0] for name in names]
    languages = {LANGUAGES[kind] for kind in kinds if kind in LANGUAGES}
    figures = {}  # name on the Hub: value and step
    if row := latest.get("val_loss"):
        figures["perplexity"] = perplexity(row["val_loss"]), row["step"]
    if row := latest.get("bits_per_byte"):
        figures["bits_per_byte"] = row["bits_per_byte"], row["step"]
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=hub[0] if len(names) == len(hub) == 1 else "custom",
            dataset_name=", ".join(_without_path(name) for name in names),
            dataset_split="validation",
            metric_type=metric,
            metric_value=round(figure, 4),
            metric_name=f"{metric.replace('_', ' ')} at step {step:.0f}",
        )
        for metric, (figure, step) in figures.items()
        if math.isfinite(figure)
    ]
    return ModelCardData(
        license="apache-2.0" if origin is None else origin["license"] or "other",
        base_model=origin["name"] if origin and "/" in (origin["name"] or "") else None,
        language=sorted(languages) if set(kinds) <= set(LANGUAGES) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["native-sparse-attention"] if run.config.model.attention.kind == "nsa" else None,
        datasets=hub or None,
        metrics=[result.metric_type for result in results] or None,
        model_name=plain(run.folder.name) if results else None,
        eval_results=results or None,
    )


def _facts(run: LoadedRun, latest: dict[str, dict[str, float]]) -> Iterator[tuple[str, object]]:
    """Yield name and value of each figure, setting and version that the run recorded."""
    if run.step is not None:
        yield "steps", f"{run.step:,} of {run.config.train.steps:,}"
        for name, (column, form) in FIGURES.items():
            if row := latest.get(column):
                yield name, f"{row[column]:{form}} (step {row['step']:,.0f})"
    env = read_json(run.folder / "env.json")
    recorded = env | (env.get("packages") or {})
    yield from ((name, recorded[name]) for name in RECORDED if recorded.get(name) is not None)


def _last_rows(run: LoadedRun) -> dict[str, dict[str, float]]:
    """Return for each column of metrics.csv the last row that has it, up to the exported step."""
    logged = read_table(run.folder / "metrics.csv").rows
    rows = [row for row in logged if row["step"] <= (run.step or -1)]
    return {column: row for row in rows for column in row}


def _source_names(data: DataConfig) -> list[str]:
    """Return the data's sources; of a prepared folder, what it was prepared from."""
    return [
        read_index(Path(name).expanduser()).stamp.source if is_prepared(name) else name
        for name in data.sources()
    ]


def _local_path(name: str) -> Path | None:
    """Return the local path in a source's name, if it is one."""
    path = Path(name.removeprefix("hf:")).expanduser()
    hub = name.startswith("hf:") and not path.is_absolute() and not path.exists()
    return path if not hub and (name.startswith("hf:") or is_path(name)) else None


def _without_path(name: str) -> str:
    """Return a source's name, or only the file or folder name of a local path."""
    path = _local_path(name)
    return name if path is None else f"{path.name} (local)"
