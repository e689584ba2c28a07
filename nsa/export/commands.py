"""Command lines of `nsa export` and `nsa import` (Hugging Face)."""

from __future__ import annotations

import argparse
from typing import Any

from nsa.atomic_io import check_new_folder
from nsa.system import user_path


def add_export_parser(verbs: Any) -> None:
    about = "write a run as a folder that transformers loads, with or without nsa installed"
    parser = verbs.add_parser("export", help=about, description=about)
    add = parser.add_argument
    about = "a run, one of its checkpoints, or a folder that `nsa import` wrote"
    add("run_path", type=user_path, metavar="run", help=about)
    add("--to", type=user_path, required=True, metavar="DIR", help="a new folder")
    about = "dense: a plain Llama, Qwen2, Qwen3 or SmolLM3, which every tool loads without this "
    about += "package; only for a run with one set of keys and values"
    add("--attention", choices=("dense",), help=about)
    about = "dtype of the weights; fp32: the optimizer's master weights (default: as trained)"
    add("--dtype", choices=("bf16", "fp32"), help=about)
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    check_new_folder(args.to)
    from transformers.utils import logging

    from nsa.export.to_hf import export

    logging.disable_progress_bar()
    folder = export(args.run_path, args.to, args.dtype, dense=args.attention == "dense")
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {size / 1e6:,.1f} MB of weights; README.md explains how to load them")
    if not (folder / "tokenizer.json").exists():
        print("no tokenizer files: the run's tokenizer is not available on this machine")
    return 0


def add_import_parser(verbs: Any) -> None:
    about = "convert an export, a Llama or a dense run into a folder that training can start from"
    parser = verbs.add_parser("import", help=about, description=about)
    add = parser.add_argument
    about = "a run, a checkpoint, an export, or another folder of transformers' save_pretrained "
    about += "with a Llama, Mistral, Qwen2, Qwen3 or SmolLM3"
    add("source", type=user_path, metavar="dir", help=about)
    add("--to", type=user_path, required=True, metavar="RUN", help="a new folder")
    about = "kind of attention (default: nsa for a Llama-like model, else unchanged)"
    add("--attention", choices=("nsa", "dense"), help=about)
    about = "tokenizer of a folder without one: byte, or hf:<name or folder>"
    add("--tokenizer", metavar="NAME", help=about)
    add("--config", type=user_path, help="YAML of settings, as for a recipe")
    about = "one setting, such as attention.spec.window=256; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    parser.set_defaults(run=_import)


def _import(args: argparse.Namespace) -> int:
    check_new_folder(args.to)
    from nsa.export.import_run import import_run

    return import_run(args)
