"""`nsa import`: another's model, or a dense one of our own, as a folder that a run begins with."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from nsa.engine.config import RunConfig
    from nsa.export.from_hf import Found
    from nsa.model import LanguageModel


LARGEST_SHARE = 100  # far beyond use; the values it scales stay finite in every dtype


def add_parser(verbs: Any) -> None:
    """Add `import` to the verbs of `nsa`."""
    about = "make a run to begin from of an export, of a Llama, or of a dense run"
    parser = verbs.add_parser("import", help=about, description=about)
    parser.add_argument(
        "place",
        type=Path,
        metavar="dir",
        help="what `nsa export` or transformers' save_pretrained wrote (model_type nsa or llama), "
        "or a run or checkpoint of ours",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="RUN", help="a new folder")
    parser.add_argument(
        "--attention",
        choices=("nsa", "dense"),
        help="which kind it gets (default: a Llama nsa, ours what it has)",
    )
    parser.add_argument("--config", type=Path, help="YAML of settings, as a recipe takes it")
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
        help="of each branch in the dense output at the start (default: 0,0.5,0.5; "
        "docs/import.md says why)",
    )
    parser.add_argument(
        "--gap",
        metavar="SOURCE",
        help="measure on the held-out text of this data.source how near the start is",
    )
    parser.set_defaults(run=_import)


def _import(args: argparse.Namespace) -> int:
    from nsa.export.dense import make_room, to_sparse
    from nsa.export.folder import new_folder
    from nsa.export.from_hf import read_model

    with new_folder(args.to) as draft:
        found = read_model(args.place)
        before = found.config.model.attention.kind
        after = args.attention or found.becomes
        _check_kinds(args, before, after)
        config = _settings(args, found, after)
        shares = _shares(args.shares, config)
        if before != after:
            make_room(config.model)
        if args.gap:  # text that cannot be had leaves nothing behind
            _check_text(args, found, config)
        source = _model(found.config, found.read(), args.place)
        weights = dict(source.state_dict())
        if before != after:
            weights = to_sparse(weights, config.model, shares)
        model = _model(config, weights, args.place)
        _write(draft, config, weights, found.tokenizer)
    print(
        f"{args.to}: {sum(p.numel() for p in model.parameters()):,} parameters, {after} attention"
    )
    if found.foreign and not found.tokenizer:
        print(f"{args.place} has no tokenizer.json: data.tokenizer = {config.data.tokenizer}")
    print(f"a recipe begins with it: --config {args.to / 'config.yaml'}", flush=True)
    if args.gap:
        _print_gap(args.gap, source, model, config)
    return 0


def _check_kinds(args: argparse.Namespace, before: str, after: str) -> None:
    if (before, after) == ("nsa", "dense"):
        raise ValueError(f"--attention dense: {args.place} has branches, which no dense model has")
    for flag, given in (("--shares", args.shares), ("--gap", args.gap)):
        if given and before == after:
            raise ValueError(
                f"{flag} {given}: {args.place} keeps its {after} attention; it is for a dense "
                "model that becomes NSA (--attention nsa)"
            )


def _settings(args: argparse.Namespace, found: Found, kind: str) -> RunConfig:
    """The settings, overruled as a recipe's are, of a run that begins with these weights."""
    from nsa.engine.resolve import resolve_config

    place, base = args.to.absolute(), found.config
    if found.tokenizer and base.data.tokenizer != "byte":
        data = replace(base.data, tokenizer=f"hf:{place}")
    else:
        data = base.data
    base = replace(
        base,
        data=data,
        model=replace(base.model, attention=replace(base.model.attention, kind=kind)),
        train=replace(base.train, start_from=str(place)),
    )
    config = resolve_config(base, args.config, args.set)
    other = config.model.attention.kind
    if other != kind:
        raise ValueError(
            f"model.attention.kind = {other!r}: --attention alone says which kind it gets, here "
            f"{kind!r}; give --attention {other}, or leave the setting out"
        )
    return config


def _shares(text: str | None, config: RunConfig) -> dict[str, float] | None:
    if text is None:
        return None
    attention = config.model.attention
    try:
        shares = dict(zip(attention.branch_names, map(float, text.split(",")), strict=True))
    except ValueError:
        raise ValueError(
            f"--shares {text}: write a number for each branch, {','.join(attention.branch_names)}"
        ) from None
    if not all(abs(share) <= LARGEST_SHARE for share in shares.values()):  # nor is NaN
        raise ValueError(
            f"--shares {text}: each is a part of the dense output, about 1 together; write numbers "
            f"from -{LARGEST_SHARE} to {LARGEST_SHARE}"
        )
    if attention.shared_kv and len(set(shares.values())) > 1:
        raise ValueError(
            f"--shares {text}: with attention.shared_kv all branches have the same values, and "
            "give the same; leave one of the two out"
        )
    return shares


def _model(config: RunConfig, weights: dict[str, Tensor], place: Path) -> LanguageModel:
    """The model that the weights make; they must fit."""
    import torch

    from nsa.checkpoint.weights import set_weights
    from nsa.model import LanguageModel

    with torch.device("meta"):
        model = LanguageModel(config.model)
    set_weights(model, weights, place, assign=True)
    return model.eval()


def _write(
    folder: Path, config: RunConfig, weights: dict[str, Tensor], tokenizer: list[Path]
) -> None:
    from nsa.engine.resolve import to_yaml
    from nsa.export.folder import write_weights

    for file in tokenizer:
        shutil.copyfile(file, folder / file.name)
    write_weights(weights, folder)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")


def _check_text(args: argparse.Namespace, found: Found, config: RunConfig) -> None:
    """Raise what would hinder the gap before weights are read; a sample of the text is enough."""
    from nsa.data.validation import open_validation

    data = replace(config.data, source=args.gap, seq_len=_lengths(config)[-1], packing="concat")
    if found.tokenizer and data.tokenizer == f"hf:{args.to.absolute()}":  # not there yet
        data.tokenizer = f"hf:{found.tokenizer[0].parent}"
    text = open_validation(data, sequences=1, micro_batch=1, world_size=1)
    try:
        text.batches(0)
    finally:
        text.close()


def _print_gap(source: str, dense: LanguageModel, model: LanguageModel, config: RunConfig) -> None:
    """Both in float32, for texts that a branch sees all of and for longer ones."""
    from nsa.export.gap import HEADER, gaps

    data = replace(config.data, source=source)
    print(HEADER)
    for gap in gaps(dense.float(), model.float(), data, _lengths(config)):
        print(gap, flush=True)


def _lengths(config: RunConfig) -> list[int]:
    spec = config.model.attention.spec
    lengths = [max(1, spec.window // 2)]
    while lengths[-1] < 2 * max(spec.window, spec.select_top * spec.select_len):
        lengths.append(2 * lengths[-1])
    return lengths
