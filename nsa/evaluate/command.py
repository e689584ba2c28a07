"""`nsa eval`: loss, perplexity and bits per byte of runs, also by position in the context."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nsa.data.source import is_path
from nsa.system import user_path
from nsa.text import first_line, printable
from nsa.validation import positive_flags

if TYPE_CHECKING:
    import torch

    from nsa.data.config import DataConfig
    from nsa.data.dataset import Dataset
    from nsa.data.tokenizer import Tokenizer
    from nsa.engine.config import RunConfig
    from nsa.engine.load_run import StoredRun
    from nsa.evaluate.perplexity import EvalData, Losses
    from nsa.evaluate.results import Row

SPLITS = {"held_out": "val", "train": "train", "all": "all"}


def add_parser(verbs: Any) -> None:
    about = "loss, perplexity and bits per byte of runs on a dataset, also by position in context"
    parser = verbs.add_parser("eval", help=about, description=about)
    add_run_arguments(parser)
    add = parser.add_argument
    about = "runs to compare with"
    add("--compare", type=user_path, nargs="+", default=[], metavar="RUN", help=about)
    add("--source", help="the dataset, as in data.source (default: the run's)")
    about = "documents to use (default: held_out of prepared or training data, else all)"
    add("--split", choices=SPLITS, help=about)
    about = "context lengths in tokens, one or more (default: as in training)"
    add("--seq-len", type=int, nargs="+", metavar="T", help=about)
    about = "tokens to evaluate at most (default: as in training's validation)"
    add("--tokens", type=int, metavar="N", help=about)
    about = "a setting of the dataset, for example data.text_field=content; repeatable"
    add("--set", action="append", default=[], metavar="data.KEY=VALUE", help=about)
    add("--out", type=user_path, help="folder for the results (default: RUN/eval)")
    add("--json", action="store_true", help="print eval.json; progress goes to stderr")
    parser.set_defaults(run=_eval)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    about = "folder of a run, a checkpoint, or an output of `nsa export` or `nsa import`"
    parser.add_argument("path", type=user_path, metavar="run", help=about)
    parser.add_argument("--device", help="for example cpu or cuda:1 (default: CUDA if available)")


def _eval(args: argparse.Namespace) -> int:
    from nsa.evaluate.results import lines

    progress_to = sys.stderr if args.json else sys.stdout
    with contextlib.redirect_stdout(progress_to), TemporaryDirectory() as temporary:
        rows, files = _evaluate_runs(args, Path(temporary))
    if args.json:
        print(files[0].read_text(), end="")
    else:
        print(*lines(rows), "", *files, sep="\n")
    return 0


def _evaluate_runs(args: argparse.Namespace, temporary: Path) -> tuple[list[Row], list[Path]]:
    """Evaluate all runs and write the results; return their rows and the files.

    `temporary`: folder for the cache of tokens if the first run's folder has none.
    """
    from nsa.data.cache import cache_folder
    from nsa.data.dataset import open_dataset
    from nsa.engine.load_run import find_run, load_run
    from nsa.evaluate.results import Result, write
    from nsa.report.compare import labelled

    positive_flags(args, "seq_len", "tokens")
    device = parse_device(args.device)
    # Every error of the settings is raised before the first, slow evaluation.
    runs = {name: find_run(path) for name, path in labelled([args.path, *args.compare]).items()}
    tokenizers = {name: require_tokenizer(name, run) for name, run in runs.items()}
    first = next(iter(runs.values()))
    config = first.config
    settings = _data_settings(args, config)
    lengths = _lengths(args, settings.seq_len)
    dataset = open_dataset(replace(settings, seq_len=lengths[-1]))
    cache = cache_folder(config.data, first.folder)
    cache = cache if cache.is_dir() else temporary
    prepared = any(source.is_prepared for source in dataset.sources)
    trained_on = any(sources_overlap(dataset.config, run.config.data) for run in runs.values())
    split = args.split or ("held_out" if prepared or trained_on else "all")
    tokens = args.tokens or config.train.eval_samples * config.data.seq_len
    data: dict[str, EvalData] = {}  # by fingerprint of the tokenizer
    for tokenizer in tokenizers.values():
        if tokenizer.fingerprint not in data:
            data[tokenizer.fingerprint] = _open_data(dataset, split, tokens, tokenizer, cache)
    out = args.out or args.path / "eval"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the folder cannot be created ({error.strerror or error})"
        raise ValueError(f"--out {out}: {reason}; name another") from None
    results: list[Result] = []
    for name, stored in runs.items():
        run, run_data = load_run(stored, device=device), data[tokenizers[name].fingerprint]
        for length in lengths:
            losses = _evaluate(name, run, run_data, length)
            results.append(Result(name, stored, length, run_data, losses))
        del run  # so that two models are never in memory together
    source = {"source": settings.source, "split": split, "packing": settings.packing}
    rows = [result.row(results) for result in results]
    return rows, write(rows, source, out)


def _log(line: str) -> None:
    """Print progress; ignore a closed stdout, so that the results are still written."""
    with contextlib.suppress(BrokenPipeError):
        print(printable(line), flush=True)


def _data_settings(args: argparse.Namespace, config: RunConfig) -> DataConfig:
    """Return the first run's data settings, overridden by --set and --source."""
    from nsa.engine.config import resolve_config

    for assignment in args.set:
        if not assignment.startswith("data."):
            raise ValueError(f"--set {assignment}: only data.* can be set here")
        if assignment.partition("=")[0].strip() == "data.tokenizer":
            raise ValueError(f"--set {assignment}: each run uses its tokenizer; leave this out")
    data = resolve_config(config, None, args.set).data
    return data if args.source is None else replace(data, source=args.source)


def _lengths(args: argparse.Namespace, trained_len: int) -> list[int]:
    """Return the context lengths, shortest first; raise if they cannot evaluate the same tokens."""
    lengths = sorted(set(args.seq_len or [trained_len]))
    for length in lengths:
        if lengths[-1] % length:
            raise ValueError(
                f"--seq-len {length} does not divide {lengths[-1]}: all lengths evaluate the same "
                "tokens; make the longest a multiple of the others"
            )
    if args.tokens is not None and args.tokens < lengths[-1]:
        raise ValueError(f"--tokens {args.tokens}: fewer than the {lengths[-1]} of one sequence")
    return lengths


def sources_overlap(data: DataConfig, other: DataConfig) -> bool:
    """Return whether two settings share a source, or a source of one contains one of the other."""

    def path_of(name: str) -> Path:
        return Path(os.path.realpath(user_path(name))) if is_path(name) else Path(name)

    pairs = product(map(path_of, data.sources()), map(path_of, other.sources()))
    return any(a == b or a in b.parents or b in a.parents for a, b in pairs)


def parse_device(name: str | None) -> torch.device | None:
    """Return the device that --device names; raise a ValueError if it does not exist."""
    import torch

    if name is None:
        return None
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {first_line(error)}") from None


def require_tokenizer(name: str, run: StoredRun) -> Tokenizer:
    """Return a run's tokenizer; raise a ValueError if it is missing or too large."""
    vocabulary = run.config.model.vocab_size
    if run.tokenizer is None:
        raise ValueError(f"{name}: its tokenizer is missing, so no text can be tokenised")
    if run.tokenizer.vocab_size > vocabulary:
        raise ValueError(
            f"{name}: model.vocab_size = {vocabulary} is too small for the "
            f"{run.tokenizer.vocab_size} ids of its tokenizer {run.tokenizer.name!r}"
        )
    return run.tokenizer


def _open_data(
    dataset: Dataset, split: str, tokens: int, tokenizer: Tokenizer, cache: Path
) -> EvalData:
    from nsa.evaluate.perplexity import open_eval_data

    config = replace(dataset.config, tokenizer=tokenizer.name)
    config.validate()
    dataset = replace(dataset, config=config)
    opened = open_eval_data(dataset, SPLITS[split], tokens, tokenizer, cache)
    note = ""
    if opened.exhausted is not None:
        note = f"; {opened.exhausted} has fewer than the {tokens:,} requested"
    _log(
        f"{', '.join(config.sources())}, split {split}, packing {config.packing}, tokenizer "
        f"{tokenizer.name}: {opened.tokens:,} tokens in {opened.count:,} samples{note}"
    )
    return opened


def _evaluate(name: str, run: StoredRun, data: EvalData, seq_len: int) -> Losses:
    from tqdm import tqdm

    from nsa.evaluate.perplexity import eval_batches, evaluate

    trained = run.config.data.seq_len
    rows = max(1, run.config.train.rows * trained // seq_len)  # as many tokens as in training
    if seq_len > trained:
        _log(f"{name}: context of {seq_len:,} tokens, in training {trained:,}")
    total = math.ceil(data.tokens / (seq_len * rows))
    progress = tqdm(eval_batches(data, seq_len, rows), name, total, disable=None, leave=False)
    return evaluate(run.model, progress, data.count, seq_len)
