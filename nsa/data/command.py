"""`nsa data`: prepare text before a run, and check prepared folders."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from nsa.constants import INTERRUPTED
from nsa.data.config import ON_ERROR, DataConfig
from nsa.data.source import SPLITS
from nsa.system import user_path
from nsa.text import printable
from nsa.untrusted import short_repr
from nsa.validation import positive_flags

if TYPE_CHECKING:
    from nsa.data.shards import Index

DEFAULT = DataConfig()
# Settings that are flags of `prepare`.
SETTINGS = "source", "subset", "split", "pattern", "text_field", "held_out", "on_error", "tokenizer"


def add_parser(verbs: Any) -> None:
    about = "prepare text for training, or check a prepared folder"
    data = verbs.add_parser("data", help=about, description=about)
    actions = data.add_subparsers(dest="action", required=True, metavar="action")

    about = "tokenise a source into a folder of shards; resumes where it was stopped"
    prepare = actions.add_parser("prepare", help=about, description=about)
    add = prepare.add_argument
    about = "fineweb_edu, hf:<dataset>, embedded, embedded:<package>, synthetic, or text files"
    add("--source", required=True, help=about)
    add("--subset", help="configuration of a hub dataset")
    add("--split", default=DEFAULT.split, help="split of a hub dataset")
    about = "files to read of a folder or a hub dataset, such as '*.py' (default: all with text)"
    add("--pattern", help=about)
    about = "at a line or local file that cannot be read: stop, or skip and count it"
    add("--on-error", choices=ON_ERROR, default=DEFAULT.on_error, help=about)
    add("--text-field", default=DEFAULT.text_field, help="the field that holds a record's text")
    add("--tokenizer", required=True, help="byte, or hf:<name or folder>")
    add("--out", type=user_path, required=True, help="the folder to write")
    about = "fraction of the documents for validation only (default 0.05)"
    add("--held-out", type=float, default=DEFAULT.held_out, help=about)
    about = "tokens per file (default 100,000,000)"
    add("--shard-tokens", type=int, default=100_000_000, help=about)
    prepare.set_defaults(run=_prepare, parser=prepare)

    about = "verify every byte of a prepared folder, and print what it holds"
    check = actions.add_parser("check", help=about, description=about)
    check.add_argument("folder", type=user_path, help="a folder that `nsa data prepare` wrote")
    check.set_defaults(run=_check, parser=check)


def _prepare(args: argparse.Namespace) -> int:
    from nsa.data.shards import find_index
    from nsa.data.writer import prepare

    positive_flags(args, "shard_tokens")
    out, index_before = args.out, find_index(args.out)
    try:
        config = DataConfig(**{name: getattr(args, name) for name in SETTINGS})
        index = prepare(config, out, shard_tokens=args.shard_tokens)
    except KeyboardInterrupt:
        print(f"nsa: stopped; the same command resumes in {out}", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:  # it names settings; name the flags
        text = str(error).replace("--set data.", "--")
        for name in SETTINGS:
            text = text.replace(f"data.{name}", f"--{name.replace('_', '-')}")
        raise ValueError(text) from error
    print(f"{out} was already finished" if index == index_before else f"{out} is finished")
    print(*index.skipped.note(index.stamp.source), *_contents(index), sep="\n")
    return 0 if all(index.of(split) for split in SPLITS) else 2


def _check(args: argparse.Namespace) -> int:
    from nsa.data.shards import read_index, verify_shards

    folder, index = args.folder, read_index(args.folder)
    verify_shards(folder, index)
    names = f"source {index.stamp.source}, tokenizer {index.stamp.tokenizer}"
    print(f"{folder}: {printable(names)}; intact")
    print(*_contents(index), sep="\n")
    return 0


def _contents(index: Index) -> list[str]:
    """Return a line per split."""
    lines = []
    for split in SPLITS:
        shards = index.of(split)
        if not shards:
            held_out = short_repr(index.settings.get("held_out"))
            lines.append(
                f"{split}: no documents, so no run can use this folder: data.held_out was "
                f"{held_out}; choose another --held-out, or a larger source"
            )
            continue
        tokens = index.tokens(split)
        text_bytes = sum(shard.text_bytes for shard in shards)
        documents = sum(shard.documents for shard in shards)
        lines.append(
            f"{split}: {tokens:,} tokens of {documents:,} documents and "
            f"{text_bytes:,} bytes, {text_bytes / tokens:.2f} bytes a token, in {len(shards):,} "
            f"shard{'s' if len(shards) > 1 else ''}"
        )
    return lines
