"""Import pipeline of `nsa import`: read a model, convert its attention, write a folder."""

from __future__ import annotations

import argparse
import math
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from nsa.constants import BRANCHES
from nsa.data.batches import Batch
from nsa.data.tokenizer import ByteTokenizer, largest_id
from nsa.engine.config import RunConfig
from nsa.engine.load_run import model_with
from nsa.engine.resolve import LARGEST, resolve_config, to_yaml
from nsa.export.from_hf import SourceModel, read_model
from nsa.export.hf_tokenizer import copy_files
from nsa.export.logit_gap import logit_gaps, read_samples
from nsa.export.origin import write_origin
from nsa.export.to_hf import output_folder, write_weights
from nsa.model.dense_to_nsa import dense_to_nsa

RANKS = 2  # of the recipes' commands; --tokens counts with them
LARGEST_SHARE = 100  # more than is useful; values scaled by it are finite in every dtype


def import_run(args: argparse.Namespace) -> int:
    """Run `nsa import`; the folder appears before the logit gap is measured."""
    with output_folder(args.to) as draft:
        source = read_model(args.source)
        old_kind = source.config.model.attention.kind
        new_kind = args.attention or source.default_attention
        _check_kinds(args, old_kind, new_kind)
        config = _new_config(args, source, new_kind)
        shares = _parse_shares(args.shares, config)
        # Before the weights are read: a missing dataset is refused in seconds.
        samples = _gap_samples(args, source, config) if args.gap else None
        old_model = model_with(source.read_weights(), source.config, args.source)
        weights = dict(old_model.state_dict())
        _check_values(weights, args.source)
        if old_kind != new_kind:
            weights = dense_to_nsa(weights, config.model, shares)
        model = model_with(weights, config, args.source)
        copy_files(source.tokenizer_files, draft)
        write_weights(weights, draft)
        if source.hf_config is not None:
            write_origin(args.source, source.hf_config, draft)
        (draft / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.to}: {parameters:,} parameters, {new_kind} attention")
    print(f"start a recipe from it: --config {args.to / 'config.yaml'}")
    train = config.train
    print(f"its schedule: {train.steps:,} steps at {train.learning_rate:g}", flush=True)
    if note := config.selects_all_note():
        print(f"nsa: warning: {note}", file=sys.stderr)
    if samples is not None:
        for line in logit_gaps(old_model.float(), model.float(), samples):
            print(line, flush=True)
    return 0


def _check_values(weights: dict[str, Tensor], source: Path) -> None:
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(f"{source}: weight {name} is not finite everywhere; copy it again")


def _check_kinds(args: argparse.Namespace, old: str, new: str) -> None:
    if (old, new) == ("nsa", "dense"):
        raise ValueError(
            f"--attention dense: {args.source} is an NSA model, which cannot become dense; omit "
            "the flag"
        )
    for flag, value in (("--shares", args.shares), ("--gap", args.gap)):
        if value and old == new:
            raise ValueError(
                f"{flag} {value}: {args.source} keeps its {new} attention; omit the flag, or "
                "convert a dense model (--attention nsa)"
            )


def _new_config(args: argparse.Namespace, source: SourceModel, kind: str) -> RunConfig:
    """Return the source's config, overridden by --config and --set, with the new folder's path."""
    folder, base = args.to.absolute(), deepcopy(source.config)
    if base.train.start_from is None:
        _continue_training(base)
    if source.has_tokenizer and base.data.tokenizer != "byte":
        base.data.tokenizer = f"hf:{folder}"
    if args.tokenizer is not None:
        base.data.tokenizer = args.tokenizer
    converts = base.model.attention.kind != kind
    base.model.attention.kind, base.train.start_from = kind, str(folder)
    config = resolve_config(base, args.config, args.set)
    attention = config.model.attention
    if converts and (attention.kind, attention.branch_names) == (kind, BRANCHES):
        # What learns best: docs/guides/sparsify.md.
        base.model.attention.compressor, base.model.attention.selector_loss = "pool", 1.0
        config = resolve_config(base, args.config, args.set)
    if args.tokens is not None:
        _set_steps(base, config, args.tokens)
        config = resolve_config(base, args.config, args.set)
    _check_tokenizer(args, source, config)
    other = config.model.attention.kind
    if other != kind:
        raise ValueError(
            f"model.attention.kind = {other!r}: only --attention sets the kind, here {kind!r}; "
            f"give --attention {other}, or omit the setting"
        )
    return config


def _continue_training(config: RunConfig) -> None:
    """Set a tenth of the rates and steps of training from nothing; the loss need not fall."""
    train = config.train
    config.train = replace(
        train,
        steps=max(1, train.steps // 10),
        warmup_steps=train.warmup_steps // 10,
        learning_rate=float(f"{train.learning_rate / 10:.6g}"),
        min_learning_rate=float(f"{train.min_learning_rate / 10:.6g}"),
        selector_steps=0,
        dense_steps=0,
    )
    config.monitor.ladder.require_fall = False


def _set_steps(base: RunConfig, config: RunConfig, tokens: float) -> None:
    """Set the steps in which `config` reads `tokens` on RANKS ranks, a twentieth of them warmup."""
    train = config.train
    sequences = train.rows * train.accumulation * RANKS // train.sequence_parallel
    if not 1 <= tokens <= LARGEST:
        raise ValueError(f"--tokens {tokens:g}: must be from 1 to {LARGEST:,}")
    base.train.steps = math.ceil(tokens / (sequences * config.data.seq_len))
    base.train.warmup_steps = base.train.steps // 20


def _check_tokenizer(args: argparse.Namespace, source: SourceModel, config: RunConfig) -> None:
    """Refuse a missing tokenizer, and the byte tokenizer for fewer ids than it has."""
    if source.hf_config is None:
        return
    file = args.source / "tokenizer.json"
    if file.is_file() and args.tokenizer is None:
        ids = largest_id(file) + 1
        if ids > config.model.vocab_size:
            raise ValueError(
                f"{file}: has ids up to {ids - 1:,}, but the model's vocabulary is "
                f"{config.model.vocab_size:,}; save the model's own tokenizer there, or name one: "
                "--tokenizer hf:<name or folder>"
            )
    tokenizer, vocab_size = config.data.tokenizer, config.model.vocab_size
    if tokenizer == f"hf:{args.source}" and not source.has_tokenizer:
        raise ValueError(
            f"{args.source}: has no tokenizer.json; save the model's tokenizer there with "
            "save_pretrained, or name one: --tokenizer byte, or --tokenizer hf:<name or folder>"
        )
    if tokenizer == "byte" and vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(
            f"--tokenizer byte: has {ByteTokenizer.vocab_size} ids, but the vocabulary of "
            f"{args.source} has {vocab_size}; name the model's tokenizer"
        )


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
            f"--shares {text}: each is a fraction of the dense output; write numbers from "
            f"-{LARGEST_SHARE} to {LARGEST_SHARE}"
        )
    return shares


def _gap_samples(args: argparse.Namespace, source: SourceModel, config: RunConfig) -> Batch:
    data = replace(config.data, source=args.gap)
    if source.has_tokenizer and data.tokenizer == f"hf:{args.to.absolute()}":  # not written yet
        data.tokenizer = f"hf:{source.tokenizer_files[0].parent}"
    return read_samples(data, config.model.attention)
