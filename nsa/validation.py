"""Checks of settings and flags; errors name the setting or flag and its value.

at_least(1, "train", self, "steps", "micro_batch")    # train.steps = 0: must be 1 or more
one_of("train", self, precision=PRECISIONS)           # train.precision = 'x': choose one of …
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


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


class Parser(argparse.ArgumentParser):
    """Parser whose errors name the nearest flag, or the nearest verb, of one that is misspelt."""

    words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        names = [name.partition("=")[0] for name in self.words]
        pairs = [(name, close) for name in names if (close := nearest(name, self))]
        hints = [f"{name} (did you mean {close}?)" for name, close in pairs]
        super().error("; ".join([message, *hints]))


def nearest(word: str, parser: Parser) -> str | None:
    """Return the flag or verb of `parser` that a misspelt word resembles."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            known += action.choices
            chosen = [action.choices[name] for name in parser.words if name in action.choices]
            known += [
                flag for each in chosen[:1] for a in each._actions for flag in a.option_strings
            ]
    if word in known or (parser.allow_abbrev and any(o.startswith(word) for o in known)):
        return None
    alike = [other for other in known if other.startswith("-") == word.startswith("-")]
    return next(iter(get_close_matches(word, alike, n=1, cutoff=0.7)), None)


def reject_unknown_flags(parser: Parser, words: Sequence[str]) -> NoReturn:
    """Exit with code 2; `words` are the arguments that `parser` did not recognize."""
    parser.words, messages = (), []
    for word in words:
        close = nearest(word.partition("=")[0], parser) if word.startswith("-") else None
        messages.append(f"{word} (did you mean {close}?)" if close else word)
    parser.error(f"unrecognized arguments: {', '.join(messages)}")


def whole_number_list(text: str) -> list[int]:
    """Parse one whole number, or several separated by commas, for a flag that takes a list."""
    return [int(word) for word in text.split(",")]
