"""A run as a folder that Hugging Face's transformers load, with or without this package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.dtypes import DTYPES
from nsa.export.folder import new_folder, write_weights

if TYPE_CHECKING:
    from nsa.data.tokenizer import Tokenizer
    from nsa.engine.load_run import LoadedRun


@dataclass(frozen=True)
class Ids:
    """What generate() has to know of the tokenizer."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Ids:
        """Text begins where another one has ended."""
        if tokenizer is None:
            return cls()
        eos = tokenizer.eos_id
        return cls(eos, eos, getattr(tokenizer, "pad_id", eos))


def export(place: Path, to: Path, dtype: str | None = None) -> Path:
    """Write the run, checkpoint or imported folder `place` into `to`, wholly or not at all.

    `dtype` "bf16" or "fp32": fp32 are the optimizer's own; None is as the weights were trained.
    """
    from nsa.engine.load_run import load_run

    with new_folder(to) as draft:
        run = load_run(place, device="cpu", dtype=None if dtype is None else DTYPES[dtype])
        _write(run, draft)
    return to


def _write(run: LoadedRun, folder: Path) -> None:
    from nsa.engine.resolve import to_yaml
    from nsa.export.bundle import bundle
    from nsa.export.card import card
    from nsa.export.tokenizer import write_tokenizer

    weights = run.model.state_dict()
    write_weights({f"model.{name}": weight for name, weight in weights.items()}, folder)
    texts = {
        "config.json": _json(_configuration(run)),
        "generation_config.json": _json(_generation(run)),
        "config.yaml": to_yaml(run.config),
        "README.md": card(run),
        **bundle(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    if run.tokenizer is not None:
        write_tokenizer(run.tokenizer, folder, run.config.data.seq_len)


def _configuration(run: LoadedRun) -> dict[str, Any]:
    from nsa.export.bundle import AUTO_MAP
    from nsa.model.hf_config import NSAConfig

    config = NSAConfig.of(
        run.config.model,
        max_position_embeddings=run.config.data.seq_len,
        architectures=["NSAForCausalLM"],
        dtype=run.model.embed.weight.dtype,
        **vars(Ids.of(run.tokenizer)),
    )
    return config.to_diff_dict() | {"auto_map": AUTO_MAP}


def _generation(run: LoadedRun) -> dict[str, Any]:
    from transformers import GenerationConfig

    return GenerationConfig(**vars(Ids.of(run.tokenizer))).to_diff_dict()


def _json(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"
