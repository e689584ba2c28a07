"""`nsa eval`: loss, perplexity and bits per byte of runs, also by position in the context."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.data.source import ALL, is_path
from nsa.untrusted import printable
from nsa.validation import positive_flags

if TYPE_CHECKING:
    import torch

    from nsa.data.config import DataConfig
    from nsa.data.tokenizer import Tokenizer
    from nsa.engine.load_run import LoadedRun, StoredRun
    from nsa.evaluate.data import EvalData
    from nsa.evaluate.results import Result

SPLITS = {"held_out": "val", "train": "train", "all": ALL}


def add_parser(verbs: Any) -> None:
    about = "loss, perplexity and bits per byte of runs on a dataset, also by position in context"
    parser = verbs.add_parser("eval", help=about, description=about)
    add_run_arguments(parser)
    add = parser.add_argument
    add("--compare", type=Path, nargs="+", default=[], metavar="RUN", help="runs to compare with")
    add("--source", help="the dataset, as in data.source (default: the run's)")
    about = "documents to use (default: held_out of the run's or prepared data, else all)"
    add("--split", choices=SPLITS, help=about)
    about = "tokens that the model sees at once, one or more lengths (default: as in training)"
    add("--seq-len", type=int, nargs="+", metavar="T", help=about)
    about = "evaluate S tokens at a time, after T - S others (default: all T at once)"
    add("--stride", type=int, metavar="S", help=about)
    about = "tokens to read at most (default: as in training's validation)"
    add("--tokens", type=int, metavar="N", help=about)
    about = "setting of the dataset, for example data.text_field=content"
    add("--set", action="append", default=[], metavar="data.KEY=VALUE", help=about)
    add("--out", type=Path, help="folder for the results (default: RUN/eval)")
    parser.set_defaults(run=_eval)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a run, a checkpoint, or what `nsa export` or `nsa import` wrote"
    parser.add_argument("path", type=Path, metavar="run", help=about)
    parser.add_argument("--device", help="for example cpu or cuda:1 (default: CUDA if available)")


@dataclass(frozen=True)
class _Settings:
    """The data and windows on which every run is evaluated."""

    data: DataConfig  # with the longest of `lengths` as seq_len
    split: str
    lengths: list[int]
    stride: int | None
    tokens: int


def _eval(args: argparse.Namespace) -> int:
    from nsa.engine.load_run import find_run, load_run
    from nsa.evaluate.results import lines, make_folder, write
    from nsa.report.compare import labelled

    _check_flags(args)
    device = parse_device(args.device)
    # Every error of the settings is raised before the first, slow evaluation.
    paths = labelled([args.path, *args.compare])
    runs = {name: find_run(path) for name, path in paths.items()}
    tokenizers = {name: require_tokenizer(name, run) for name, run in runs.items()}
    settings = _resolve_settings(args, runs)
    data: dict[str, EvalData] = {}  # by fingerprint of the tokenizer
    for tokenizer in tokenizers.values():
        if tokenizer.fingerprint not in data:
            data[tokenizer.fingerprint] = _open_data(settings, tokenizer)
    out = args.out or args.path / "eval"
    make_folder(out)
    results: list[Result] = []
    for name, stored in runs.items():
        run = load_run(stored, device=device)
        for length in settings.lengths:
            run_data = data[tokenizers[name].fingerprint]
            results.append(_evaluate(name, run, run_data, settings.stride or length, length))
    source = {
        "source": settings.data.source,
        "split": settings.split,
        "packing": settings.data.packing,
    }
    rows = [result.row(results) for result in results]
    files = write(rows, source, out)
    print(*lines(rows), "", *files, sep="\n")
    return 0


def _log(line: str) -> None:
    """Print progress; ignore a closed stdout, so that the results are still written."""
    with contextlib.suppress(BrokenPipeError):
        print(printable(line), flush=True)


def _check_flags(args: argparse.Namespace) -> None:
    positive_flags(args, "seq_len", "stride", "tokens")
    lengths = args.seq_len or []
    for length in lengths:
        if max(lengths) % length:
            raise ValueError(
                f"--seq-len {length} does not divide {max(lengths)}: all lengths evaluate the same "
                "tokens; make the longest a multiple of the others"
            )
    for assignment in args.set:
        if not assignment.startswith("data."):
            raise ValueError(f"--set {assignment}: only data.* can be set here")
        if assignment.partition("=")[0].strip() == "data.tokenizer":
            raise ValueError(f"--set {assignment}: each run uses its tokenizer; leave this out")


def parse_device(name: str | None) -> torch.device | None:
    """Return the device that --device names; raise a ValueError if it does not exist."""
    import torch

    if name is None:
        return None
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise ValueError(f"--device {name}: computes nothing; choose cpu or cuda")
    return device


def _resolve_settings(args: argparse.Namespace, runs: Mapping[str, StoredRun]) -> _Settings:
    from nsa.data.shards import is_prepared
    from nsa.engine.resolve import resolve_config

    config = next(iter(runs.values())).config
    data = resolve_config(config, None, args.set).data
    if args.source is not None:
        data = replace(data, source=args.source)
    # Of its own data, a run was trained on all but the held-out documents; of other data, on none.
    prepared = any(map(is_prepared, data.sources()))
    has_held_out = prepared
    for name, run in runs.items():
        trained = run.config.data
        if sources_overlap(data, trained):
            has_held_out = True
            if not prepared and _divided_otherwise(data, trained):
                if data.held_out != trained.held_out:
                    _log(
                        f"{name}: data.held_out = {data.held_out} instead of the "
                        f"{trained.held_out} of its training, which read some of the documents "
                        "evaluated here"
                    )
                else:
                    _log(
                        f"{name}: few documents are divided by position, more by hash; here the "
                        "split differs from its training's, which read some of the text evaluated "
                        "here"
                    )
    lengths = sorted(set(args.seq_len or [data.seq_len]))
    for length in lengths:
        if args.stride is not None and length % args.stride:
            raise ValueError(f"--stride {args.stride} does not divide --seq-len {length}")
    if args.tokens is not None and args.tokens < lengths[-1]:
        raise ValueError(f"--tokens {args.tokens}: fewer than the {lengths[-1]} of one sequence")
    return _Settings(
        data=replace(data, seq_len=lengths[-1]),
        split=args.split or ("held_out" if has_held_out else "all"),
        lengths=lengths,
        stride=args.stride,
        tokens=args.tokens or config.train.eval_samples * config.data.seq_len,
    )


def _divided_otherwise(data: DataConfig, trained: DataConfig) -> bool:
    """Return whether the validation split of `data` holds text that `trained` trains on."""
    from nsa.data.factory import held_out

    positions = [
        {held_out(config, name).by_position for name in config.sources()}
        for config in (data, trained)
    ]
    return data.held_out > trained.held_out or positions[0] != positions[1]


def sources_overlap(data: DataConfig, other: DataConfig) -> bool:
    """Return whether the two have a source in common, or one a file in the other's folder."""
    return any(
        a == b or a in b.parents or b in a.parents
        for a in _source_paths(data)
        for b in _source_paths(other)
    )


def _source_paths(data: DataConfig) -> list[Path]:
    return [
        Path(os.path.realpath(Path(name).expanduser())) if is_path(name) else Path(name)
        for name in data.sources()
    ]


def require_tokenizer(name: str, run: StoredRun) -> Tokenizer:
    """Return a run's tokenizer; raise a ValueError if it is missing or too large."""
    vocabulary = run.config.model.vocab_size
    if run.tokenizer is None:
        raise ValueError(f"{name}: its tokenizer is missing, so no text can be read")
    if run.tokenizer.vocab_size > vocabulary:
        raise ValueError(
            f"{name}: model.vocab_size = {vocabulary} is too small for the "
            f"{run.tokenizer.vocab_size} ids of its tokenizer {run.tokenizer.name!r}"
        )
    return run.tokenizer


def _open_data(settings: _Settings, tokenizer: Tokenizer) -> EvalData:
    from nsa.data.batch_source import source_names
    from nsa.evaluate.data import open_eval_data

    config = replace(settings.data, tokenizer=tokenizer.name)
    config.validate()
    data = open_eval_data(config, SPLITS[settings.split], settings.tokens, tokenizer)
    note = ""
    if data.exhausted is not None:
        note = f"; {data.exhausted} has fewer than the {settings.tokens:,} requested"
    _log(
        f"{source_names(config)}, split {settings.split}, packing {config.packing}, tokenizer "
        f"{tokenizer.name}: {data.tokens:,} tokens in {data.count:,} samples{note}"
    )
    return data


def _evaluate(name: str, run: LoadedRun, data: EvalData, stride: int, seq_len: int) -> Result:
    from tqdm import tqdm

    from nsa.evaluate import perplexity
    from nsa.evaluate.data import eval_batches
    from nsa.evaluate.results import Result

    trained = run.config.data.seq_len
    rows = max(1, run.config.train.micro_batch * trained // seq_len)  # tokens as in training
    if seq_len > trained:
        _log(f"{name}: sees {seq_len:,} tokens at once, and saw {trained:,} in training")
    count = -(-data.tokens // stride // rows)
    batches = eval_batches(data, seq_len, stride, rows)
    progress = tqdm(batches, name, count, disable=None, leave=False)
    return Result(
        run=name,
        path=run.folder,
        step=run.step,
        trained_len=trained,
        seq_len=seq_len,
        stride=stride,
        data=data,
        losses=perplexity.evaluate(run.model, progress, data.count, seq_len),
    )
