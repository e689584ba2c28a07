"""Checks of settings and flags; errors name the setting or flag and its value.

at_least(1, "train", self, "steps", "micro_batch")    # train.steps = 0: must be 1 or more
one_of("train", self, precision=PRECISIONS)           # train.precision = 'x': choose one of …
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn


def at_least(low: int, section: str, config: object, *names: str) -> None:
    """Require each named field of `config` to be `low` or more; NaN is refused too."""
    for name in names:
        value = getattr(config, name)
        if not value >= low:
            raise ValueError(f"{section}.{name} = {value}: must be {low} or more")


def at_most(high: int, section: str, config: object, *names: str) -> None:
    """Require each named field of `config` to be `high` or less: a larger one would only hang."""
    for name in names:
        value = getattr(config, name)
        if value > high:
            raise ValueError(f"{section}.{name} = {value}: must be {high:,} or less")


def above_zero(section: str, config: object, *names: str) -> None:
    """Require each named field of `config` to be above 0."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"{section}.{name} = {value}: must be above 0")


def whole_numbers(low: int, section: str, config: object, *names: str) -> None:
    """Require integers of `low` or more, in a config whose types are not checked yet."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < low:
            raise ValueError(f"{section}.{name} = {value!r}: must be a whole number, {low} or more")


def one_of(section: str, config: object, **choices: Sequence[str]) -> None:
    """Require each named field to be one of its `choices`."""
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{section}.{name} = {value!r}: choose one of {', '.join(allowed)}")


def positive_flags(args: object, *names: str) -> None:
    """Require each value of these command-line flags, if given, to be 1 or more."""
    for name in names:
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: must be 1 or more")


def reject_unknown_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    """Exit with code 2; `words` are the arguments that `parser` did not recognize."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    messages = []
    for word in words:
        flag = word.partition("=")[0] if word.startswith("-") else ""
        close = get_close_matches(flag, flags, n=1, cutoff=0.7)
        messages.append(f"{word} (did you mean {close[0]}?)" if close else word)
    parser.error(f"unrecognized arguments: {', '.join(messages)}")
