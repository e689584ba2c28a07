"""Import pipeline of `nsa import`: read a model, add or drop an index, write a folder."""

from __future__ import annotations

import argparse
import sys
from copy import deepcopy
from dataclasses import replace

from tokenizers import Tokenizer

from nsa.data.tokenizer import ORIGIN, ByteTokenizer, name_in_errors
from nsa.engine.config import RunConfig, resolve_config, to_yaml
from nsa.engine.load_run import model_with
from nsa.export.from_hf import SourceModel, read_model
from nsa.export.hf_tokenizer import TOKENIZER_FILES, copy_files
from nsa.export.origin import write_origin
from nsa.export.to_hf import output_folder, write_weights
from nsa.model.config import IMPORTED, AttentionConfig
from nsa.model.index import add_index, without_index
from nsa.spec import NSASpec


def import_run(args: argparse.Namespace) -> int:
    with output_folder(args.to) as draft:
        source = read_model(args.source)
        old = source.config.model.attention
        new_kind = args.attention or ("nsa" if source.is_llama else old.kind)
        if (old.kind, new_kind) == ("nsa", "dense") and not old.has_index:
            raise ValueError(
                f"--attention dense: {args.source} has the keys and values of several branches, "
                "which cannot become dense; omit the flag"
            )
        config = _new_config(args, source, new_kind)
        weights = source.read_weights()
        if (old.kind, new_kind) == ("dense", "nsa"):
            weights = add_index(weights, config.model)
        elif (old.kind, new_kind) == ("nsa", "dense"):
            weights = without_index(weights)
        model = model_with(weights, config, args.source)  # checks names, shapes and dtypes
        for name, weight in weights.items():
            if not weight.isfinite().all():
                raise ValueError(
                    f"{args.source}: weight {name} has infinite or NaN elements; copy it again"
                )
        copy_files((source.folder / name for name in (*TOKENIZER_FILES, ORIGIN)), draft)
        write_weights(dict(model.state_dict()), draft)
        if source.hf_config is not None:
            write_origin(args.source, source.hf_config, draft)
        (draft / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.to}: {parameters:,} parameters, {new_kind} attention")
    if old.kind == "dense" and new_kind == "nsa":
        print(f"make it sparse: python recipes/sparsify.py --set train.start_from={args.to}")
    schedule = f"{config.train.steps:,} steps at {config.train.learning_rate:g}"
    settings = f"--config {args.to / 'config.yaml'}"
    print(f"start a recipe from it: {settings} ({schedule})", flush=True)
    if note := config.selects_all_note():
        print(f"nsa: warning: {note}", file=sys.stderr)
    return 0


def _new_config(args: argparse.Namespace, source: SourceModel, kind: str) -> RunConfig:
    """Return the source's config, overridden by --config and --set; training starts from --to."""
    folder, base = args.to.absolute(), deepcopy(source.config)
    train = base.train
    if train.start_from is None:  # a tenth of the steps and rates of training from random weights
        # The format turns 6e-4 / 10 = 5.9999999999999995e-05 into 6e-05.
        base.train = replace(
            train,
            steps=max(1, train.steps // 10),
            warmup_steps=train.warmup_steps // 10,
            learning_rate=float(f"{train.learning_rate / 10:.6g}"),
            min_learning_rate=float(f"{train.min_learning_rate / 10:.6g}"),
            selector_steps=0,
            dense_steps=0,
        )
    if source.has_tokenizer and base.data.tokenizer != "byte":
        base.data.tokenizer = f"hf:{folder}"
    if args.tokenizer is not None:
        base.data.tokenizer = args.tokenizer
    if base.model.attention.kind != kind:
        base.model.attention = _converted(base.model.attention, kind)
    base.train.start_from = str(folder)
    config = resolve_config(base, args.config, args.set)
    _check_tokenizer(args, source, config)
    old, new = source.config.model.attention, config.model.attention
    if new.kind != kind:
        raise ValueError(
            f"model.attention.kind = {new.kind!r}: only --attention sets the kind, here {kind!r}; "
            f"give --attention {new.kind}, or omit the setting"
        )
    if old.kind == "dense" and new.kind == "nsa" and not new.has_index:
        raise ValueError(
            f"model.attention.branches = {new.branches!r}: a dense model has one set of keys and "
            "values; set branches=sel, or omit the setting"
        )
    return config


def _converted(attention: AttentionConfig, kind: str) -> AttentionConfig:
    """Return the settings of dense attention, or of attention with an index.

    Attention with an index gets the block sizes of IMPORTED (figures:
    docs/benchmarks/real-weights.md), unless the source has other sizes than the default.
    """
    if kind == "dense":
        return replace(attention, kind=kind, selector_loss=0.0)
    sizes = IMPORTED if attention.spec == NSASpec() else attention.spec
    return AttentionConfig(
        branches="sel",
        compressor="mean" if sizes.block_len == 1 else "pool",
        selector_loss=1.0,
        spec=replace(sizes, window=NSASpec.window),
        backend=attention.backend,
    )


def _check_tokenizer(args: argparse.Namespace, source: SourceModel, config: RunConfig) -> None:
    """Refuse a missing tokenizer, and one with ids beyond the model's vocabulary."""
    if source.hf_config is None:
        return
    file = args.source / "tokenizer.json"
    if file.is_file() and args.tokenizer is None:
        with name_in_errors(str(file)):
            vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
        largest = max(vocabulary.values(), default=-1)
        if largest >= config.model.vocab_size:
            raise ValueError(
                f"{file}: has ids up to {largest:,}, but the model's vocabulary is "
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
