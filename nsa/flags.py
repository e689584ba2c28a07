"""Unknown command-line flags: exit with the usage and the closest known flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn


def reject_unknown_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    """Exit with code 2; `words` are the arguments that `parser` did not recognize."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    messages = []
    for word in words:
        flag = word.partition("=")[0] if word.startswith("-") else ""
        close = get_close_matches(flag, flags, n=1, cutoff=0.7)
        messages.append(f"{word} (did you mean {close[0]}?)" if close else word)
    parser.error(f"unrecognized arguments: {', '.join(messages)}")
