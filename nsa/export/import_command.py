"""`nsa import`: turn an export, a Llama or a dense run into a folder that training starts from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(verbs: Any) -> None:
    about = "make a folder that training starts from, of an export, a Llama or a dense run"
    parser = verbs.add_parser("import", help=about, description=about)
    parser.add_argument(
        "source",
        type=Path,
        metavar="dir",
        help="what `nsa export` or transformers' save_pretrained wrote (model_type nsa or llama), "
        "or a run or checkpoint of this package",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="RUN", help="a new folder")
    parser.add_argument(
        "--attention",
        choices=("nsa", "dense"),
        help="kind of attention (default: nsa for a Llama, else unchanged)",
    )
    parser.add_argument("--config", type=Path, help="YAML of settings, as for a recipe")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting, such as attention.spec.window=256; may be repeated",
    )
    parser.add_argument(
        "--shares",
        metavar="S,S,S",
        help="each branch's share of the dense output at the start (default: 0,0.5,0.5; see "
        "docs/import.md)",
    )
    parser.add_argument(
        "--gap",
        metavar="SOURCE",
        help="compare the result with the dense model on the validation split of this data.source",
    )
    parser.set_defaults(run=_import)


def _import(args: argparse.Namespace) -> int:
    from nsa.export.import_run import import_run

    return import_run(args)
