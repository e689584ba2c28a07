"""`nsa export`: write a run as a Hugging Face model folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(verbs: Any) -> None:
    about = "write a run as a folder that transformers loads, with or without nsa installed"
    parser = verbs.add_parser("export", help=about, description=about)
    parser.add_argument(
        "run_path",
        type=Path,
        metavar="run",
        help="a run, one of its checkpoints, or a folder that `nsa import` wrote",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        help="of the weights; fp32: the optimizer's master weights (default: as trained)",
    )
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from nsa.export.to_hf import export

    logging.disable_progress_bar()
    folder = export(args.run_path, args.to, args.dtype)
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {size / 1e6:,.1f} MB of weights; README.md explains how to load them")
    if not (folder / "tokenizer.json").exists():
        print("no tokenizer: the run's tokenizer is not available here")
    return 0
