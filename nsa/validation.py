"""Checks of settings and flags; errors name the setting or flag and its value.

at_least(1, "train", self, "steps", "micro_batch")    # train.steps = 0: must be 1 or more
one_of("train", self, on_bad_step=("abort", "skip"))  # train.on_bad_step = 'x': choose one of …
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from nsa.withdrawn import FLAGS


def at_least(low: int, section: str, config: object, *names: str) -> None:
    """Require each named field of `config` to be `low` or more; NaN is refused too."""
    for name in names:
        value = getattr(config, name)
        if not value >= low:
            raise ValueError(f"{section}.{name} = {value}: must be {low} or more")


def at_most(high: int, section: str, config: object, *names: str) -> None:
    """Require each named field of `config` to be `high` or less: larger values would hang a run."""
    for name in names:
        value = getattr(config, name)
        if value > high:
            raise ValueError(f"{section}.{name} = {value}: must be {high:,} or less")


def above_zero(section: str, config: object, *names: str) -> None:
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
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{section}.{name} = {value!r}: choose one of {', '.join(allowed)}")


def positive_flags(args: object, *names: str) -> None:
    """Require each value of these command-line flags, if given, to be 1 or more."""
    for name in names:
        value = getattr(args, name)
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: must be 1 or more")


class Parser(argparse.ArgumentParser):
    """Parser whose errors name the nearest flag or verb of a misspelt one."""

    words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        hints = [self.hint(word) for word in self.words]
        super().error("; ".join([message, *(hint for hint in hints if hint not in self.words)]))

    def hint(self, word: str) -> str:
        """Return `word`; if it is misspelt, with the flag or verb that it resembles."""
        verbs: dict[str, argparse.ArgumentParser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                verbs = action.choices
        name = word.partition("=")[0]
        known = list(verbs)
        if word.startswith("-"):
            parsers = [self, *(verbs[verb] for verb in self.words if verb in verbs)]
            known = [flag for parser in parsers for flag in parser._option_string_actions]
        is_abbreviation = self.allow_abbrev and any(other.startswith(name) for other in known)
        if name in known or is_abbreviation:
            return word
        close = get_close_matches(name, known, n=1, cutoff=0.7)
        return f"{word} (did you mean {close[0]}?)" if close else word


def reject_unknown_flags(parser: Parser, words: Sequence[str]) -> NoReturn:
    """Exit with code 2; `words` are the arguments that `parser` did not recognize."""
    parser.words = ()  # `error` adds no hints: the message below has them
    for word in words:
        if advice := FLAGS.get(f"{parser.prog} {word.partition('=')[0]}"):
            parser.error(f"{word}: withdrawn in this version; {advice}")
    has_settings = "--set" in parser._option_string_actions
    hints = []
    for word in words:
        is_setting = has_settings and re.match(r"[a-z_.]+=", word)
        hints.append(f"{word} (did you mean --set {word}?)" if is_setting else parser.hint(word))
    parser.error(f"unrecognized arguments: {', '.join(hints)}")
