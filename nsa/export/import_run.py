"""Import pipeline of `nsa import`: read a model, convert its attention, write a folder."""

from __future__ import annotations

import argparse
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nsa.checkpoint.weights import set_weights
from nsa.data.validation import open_validation
from nsa.engine.config import RunConfig
from nsa.engine.resolve import resolve_config, to_yaml
from nsa.export.dense_to_nsa import dense_to_nsa, widen_mlp_compressor
from nsa.export.from_hf import SourceModel, read_model
from nsa.export.logit_gap import HEADER, logit_gaps
from nsa.export.output_folder import output_folder, write_weights
from nsa.model import LanguageModel

LARGEST_SHARE = 100  # beyond any use, but finite in every dtype


def import_run(args: argparse.Namespace) -> int:
    with output_folder(args.to) as draft:
        source = read_model(args.source)
        before = source.config.model.attention.kind
        after = args.attention or source.default_attention
        _check_kinds(args, before, after)
        config = _new_config(args, source, after)
        shares = _parse_shares(args.shares, config)
        if before != after:
            widen_mlp_compressor(config.model)
        if args.gap:  # before the slow part: a missing dataset must leave nothing behind
            _check_gap_data(args, source, config)
        old_model = _build_model(source.config, source.read_weights(), args.source)
        weights = dict(old_model.state_dict())
        if before != after:
            weights = dense_to_nsa(weights, config.model, shares)
        model = _build_model(config, weights, args.source)
        for file in source.tokenizer_files:
            shutil.copyfile(file, draft / file.name)
        write_weights(weights, draft)
        (draft / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.to}: {parameters:,} parameters, {after} attention")
    if not source.has_run_config and not source.tokenizer_files:
        print(f"{args.source} has no tokenizer.json: data.tokenizer = {config.data.tokenizer}")
    print(f"start a recipe from it: --config {args.to / 'config.yaml'}", flush=True)
    if args.gap:
        data = replace(config.data, source=args.gap)
        print(HEADER)
        for gap in logit_gaps(old_model.float(), model.float(), data, _gap_lengths(config)):
            print(gap, flush=True)
    return 0


def _check_kinds(args: argparse.Namespace, before: str, after: str) -> None:
    if (before, after) == ("nsa", "dense"):
        raise ValueError(
            f"--attention dense: {args.source} has NSA branches, which no dense model has; leave "
            "the flag out"
        )
    for flag, value in (("--shares", args.shares), ("--gap", args.gap)):
        if value and before == after:
            raise ValueError(
                f"{flag} {value}: {args.source} keeps its {after} attention; it is for a dense "
                "model that becomes NSA (--attention nsa)"
            )


def _new_config(args: argparse.Namespace, source: SourceModel, kind: str) -> RunConfig:
    """The source's config, started from the new folder and overridden by --config and --set."""
    folder, base = args.to.absolute(), source.config
    data, model = base.data, base.model
    if source.tokenizer_files and data.tokenizer != "byte":
        data = replace(data, tokenizer=f"hf:{folder}")
    model = replace(model, attention=replace(model.attention, kind=kind))
    train = replace(base.train, start_from=str(folder))
    base = replace(base, data=data, model=model, train=train)
    config = resolve_config(base, args.config, args.set)
    other = config.model.attention.kind
    if other != kind:
        raise ValueError(
            f"model.attention.kind = {other!r}: only --attention sets the kind, here {kind!r}; "
            f"give --attention {other}, or leave the setting out"
        )
    return config


def _parse_shares(text: str | None, config: RunConfig) -> dict[str, float] | None:
    if text is None:
        return None
    attention = config.model.attention
    try:
        shares = dict(zip(attention.branch_names, map(float, text.split(",")), strict=True))
    except ValueError:
        raise ValueError(
            f"--shares {text}: write a number for each branch, {','.join(attention.branch_names)}"
        ) from None
    if not all(abs(share) <= LARGEST_SHARE for share in shares.values()):  # false for NaN too
        raise ValueError(
            f"--shares {text}: each is a fraction of the dense output, about 1 in total; write "
            f"numbers from -{LARGEST_SHARE} to {LARGEST_SHARE}"
        )
    if attention.shared_kv and len(set(shares.values())) > 1:
        raise ValueError(
            f"--shares {text}: with attention.shared_kv all branches have the same values and so "
            "the same share; leave one of the two out"
        )
    return shares


def _build_model(config: RunConfig, weights: dict[str, Tensor], source: Path) -> LanguageModel:
    with torch.device("meta"):
        model = LanguageModel(config.model)
    set_weights(model, weights, source, assign=True)
    return model.eval()


def _check_gap_data(args: argparse.Namespace, source: SourceModel, config: RunConfig) -> None:
    """Raise the errors of `logit_gaps` about its data early, by reading one sample."""
    length = _gap_lengths(config)[-1]
    data = replace(config.data, source=args.gap, seq_len=length, packing="concat")
    if source.tokenizer_files and data.tokenizer == f"hf:{args.to.absolute()}":  # not written yet
        data.tokenizer = f"hf:{source.tokenizer_files[0].parent}"
    validation = open_validation(data, sequences=1, micro_batch=1, world_size=1)
    with closing(validation):
        validation.batches(0)


def _gap_lengths(config: RunConfig) -> list[int]:
    """From texts that every branch sees completely to texts twice as long as any branch sees."""
    spec = config.model.attention.spec
    lengths = [max(1, spec.window // 2)]
    while lengths[-1] < 2 * max(spec.window, spec.select_top * spec.select_len):
        lengths.append(2 * lengths[-1])
    return lengths
