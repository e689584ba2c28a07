"""Command lines with a word that nobody knows: the right verb's usage, and the nearest flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn


def reject_unknown_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    """End with exit code 2; `words` are what `parser` left over."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    said = []
    for word in words:
        near = (
            get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.7)
            if word[:1] == "-"
            else []
        )
        said.append(f"{word} (did you mean {near[0]}?)" if near else word)
    parser.error(f"unrecognized arguments: {', '.join(said)}")
