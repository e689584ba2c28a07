"""`nsa eval`: how well runs predict a text, beside each other and by position in their context."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.data.source import ALL, is_path

if TYPE_CHECKING:
    import torch

    from nsa.data.config import DataConfig
    from nsa.data.tokenizer import Tokenizer
    from nsa.engine.load_run import LoadedRun, StoredRun
    from nsa.evaluate.results import Result
    from nsa.evaluate.text import Text

SPLITS = {"held_out": "val", "train": "train", "all": ALL}


def add_parser(verbs: Any) -> None:
    """Add `eval` to the verbs of `nsa`."""
    about = "loss, perplexity and bits per byte of runs on a text, also by position in context"
    parser = verbs.add_parser("eval", help=about, description=about)
    add_run(parser)
    parser.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="RUN", help="others beside it"
    )
    parser.add_argument("--source", help="the text, as data.source names it (default: the run's)")
    parser.add_argument(
        "--split",
        choices=SPLITS,
        help="which documents (default: held_out of the run's own or prepared text, else all)",
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        nargs="+",
        metavar="T",
        help="tokens that the model sees at once (default: as trained); several: one after another",
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="S",
        help="judge S tokens at a time, behind T - S others (default: all T of them at once)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="how many to read; more than there are: all (default: as training's evaluations)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="data.KEY=VALUE",
        help="how the text is read, such as data.text_field=content",
    )
    parser.add_argument("--out", type=Path, help="folder for the results (default: RUN/eval)")
    parser.set_defaults(run=_eval)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run that a verb opens, and where it is to work."""
    parser.add_argument(
        "place",
        type=Path,
        metavar="run",
        help="a run, a checkpoint, or what `nsa export` or `nsa import` wrote",
    )
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: CUDA if there is one)")


@dataclass(frozen=True)
class _Asked:
    """What every run is judged on."""

    data: DataConfig  # its seq_len is the longest of the lengths
    split: str
    lengths: list[int]
    stride: int | None
    tokens: int


def _eval(args: argparse.Namespace) -> int:
    from nsa.engine.load_run import find_run, load_run
    from nsa.evaluate.results import lines, new_folder, write
    from nsa.report.compare import labelled

    _check(args)
    device = chosen_device(args.device)
    # What can be refused is refused before the first run is judged, which takes long.
    places = labelled([args.place, *args.compare])
    runs = {name: find_run(place) for name, place in places.items()}
    tokenizers = {name: tokenizer_of(name, run) for name, run in runs.items()}
    asked = _asked(args, runs)
    texts: dict[str, Text] = {}  # by the tokenizer that cut them
    for tokenizer in tokenizers.values():
        if tokenizer.fingerprint not in texts:
            texts[tokenizer.fingerprint] = _read(asked, tokenizer)
    out = args.out or args.place / "eval"
    new_folder(out)
    results: list[Result] = []
    for name, found in runs.items():
        run = load_run(found, device=device)
        for length in asked.lengths:
            text = texts[tokenizers[name].fingerprint]
            results.append(_judge(name, run, text, asked, length))
    said = {"source": asked.data.source, "split": asked.split, "packing": asked.data.packing}
    written = write(results, said, out)
    print(*lines(results), "", *written, sep="\n")
    return 0


def _say(line: str) -> None:
    """Tell what is being done; who does not read it may still want the results."""
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be, before anything is read."""
    lengths = args.seq_len or []
    named = [("--seq-len", length) for length in lengths]
    for flag, value in (*named, ("--stride", args.stride), ("--tokens", args.tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value}: must be 1 or more")
    for length in lengths:
        if max(lengths) % length:
            raise ValueError(
                f"--seq-len {length} does not divide {max(lengths)}: all lengths judge the same "
                "tokens, and the longest must be a multiple of the others"
            )
    for assignment in args.set:
        if not assignment.startswith("data."):
            raise ValueError(f"--set {assignment}: only data.* can be set here, how text is read")
        if assignment.partition("=")[0].strip() == "data.tokenizer":
            raise ValueError(f"--set {assignment}: each run reads with its own; leave this out")


def chosen_device(name: str | None) -> torch.device | None:
    """What --device names, refused where it is not there; None: the run is to choose."""
    import torch

    if name is None:
        return None
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise ValueError(f"--device {name}: nothing is computed there; name one such as cpu")
    return device


def _asked(args: argparse.Namespace, runs: Mapping[str, StoredRun]) -> _Asked:
    """The flags, where they are silent the first run's own settings."""
    from nsa.data.shards import is_prepared
    from nsa.engine.resolve import resolve_config

    config = next(iter(runs.values())).config
    data = resolve_config(config, None, args.set).data
    if args.source is not None:
        data = replace(data, source=args.source)
    # A run was trained on the rest of its own text; of another it has seen nothing.
    prepared = any(map(is_prepared, data.parts()))
    divided = prepared
    for name, run in runs.items():
        own = run.config.data
        if not share_text(data, own):
            continue
        if data.held_out > own.held_out and not prepared:
            _say(
                f"{name}: data.held_out = {data.held_out}, and {own.held_out} in training: some of "
                "the documents held out here have been trained on"
            )
        divided = True
    lengths = sorted(set(args.seq_len or [data.seq_len]))
    for length in lengths:
        if args.stride is not None and length % args.stride:
            raise ValueError(f"--stride {args.stride} does not divide --seq-len {length}")
    if args.tokens is not None and args.tokens < lengths[-1]:
        raise ValueError(f"--tokens {args.tokens}: fewer than the {lengths[-1]} of one sequence")
    return _Asked(
        data=replace(data, seq_len=lengths[-1]),
        split=args.split or ("held_out" if divided else "all"),
        lengths=lengths,
        stride=args.stride,
        tokens=args.tokens or config.train.eval_samples * config.data.seq_len,
    )


def share_text(one: DataConfig, other: DataConfig) -> bool:
    """Whether a source of one is a source of the other, or a file in its folder."""
    return any(
        text == known or text in known.parents or known in text.parents
        for text in _texts(one)
        for known in _texts(other)
    )


def _texts(data: DataConfig) -> list[Path]:
    """The sources, those that are files the same however their path is spelled."""
    return [
        Path(os.path.realpath(Path(name).expanduser())) if is_path(name) else Path(name)
        for name in data.parts()
    ]


def tokenizer_of(name: str, run: StoredRun) -> Tokenizer:
    """The tokenizer of the run that messages call `name`, where that belongs to its model."""
    vocabulary = run.config.model.vocab_size
    if run.tokenizer is None:
        raise ValueError(f"{name}: no text can be read without its tokenizer, which is not there")
    if run.tokenizer.vocab_size > vocabulary:
        raise ValueError(
            f"{name}: model.vocab_size = {vocabulary} is too small for the "
            f"{run.tokenizer.vocab_size} ids of its tokenizer {run.tokenizer.name!r}"
        )
    return run.tokenizer


def _read(asked: _Asked, tokenizer: Tokenizer) -> Text:
    """The text in a run's own tokens, and a line about it."""
    from nsa.data.batch_source import source_names
    from nsa.evaluate.text import open_text

    data = replace(asked.data, tokenizer=tokenizer.name)
    data.validate()
    text = open_text(data, SPLITS[asked.split], asked.tokens, tokenizer)
    ends = ""
    if text.shortest is not None:
        ends = f"; {text.shortest} has no more of the {asked.tokens:,} that were asked for"
    _say(
        f"{source_names(data)}, split {asked.split}, packing {data.packing}, tokenizer "
        f"{tokenizer.name}: {text.tokens:,} tokens in {text.count:,} samples{ends}"
    )
    return text


def _judge(name: str, run: LoadedRun, text: Text, asked: _Asked, seq_len: int) -> Result:
    from tqdm import tqdm

    from nsa.evaluate.perplexity import judge
    from nsa.evaluate.results import Result
    from nsa.evaluate.text import pieces

    trained = run.config.data.seq_len
    stride = asked.stride or seq_len
    rows = max(1, run.config.train.micro_batch * trained // seq_len)  # what training had at once
    if seq_len > trained:
        _say(f"{name}: sees {seq_len:,} tokens at once, and saw {trained:,} in training")
    batches = -(-text.tokens // stride // rows)
    found = tqdm(pieces(text, seq_len, stride, rows), name, batches, disable=None, leave=False)
    return Result(
        run=name,
        place=run.folder,
        step=run.step,
        trained_len=trained,
        seq_len=seq_len,
        stride=stride,
        text=text,
        judged=judge(run.model, found, text.count, seq_len),
    )
