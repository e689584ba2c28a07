"""Shell completion of `nsa`: verbs, their flags and choices, from the parser itself.

eval "$(nsa completion bash)"          or zsh
nsa completion fish | source
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
# Where no word matches, bash and zsh complete file names.
BASH = """\
_nsa() {{
    local words verb
    verb="${{COMP_WORDS[1]}}"
    [ "$COMP_CWORD" -gt 1 ] || verb=
    case "$verb" in
{cases}
    *) words="{verbs}" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _nsa nsa
"""
ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that makes `shell` complete the words of `parser`."""
    verbs = subcommands(parser)
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(verbs))
    cases = "\n".join(
        f'    {verb}) words="{" ".join(_words(each))}" ;;' for verb, each in verbs.items()
    )
    script = BASH.format(cases=cases, verbs=" ".join(verbs))
    return ZSH + script if shell == "zsh" else script


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb; empty if `parser` has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Return a verb's long flags, and the words that its positional arguments can be."""
    words = []
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        words += flags or [str(word) for word in action.choices or ()]
    for each in subcommands(parser).values():
        words += [word for word in _words(each) if word not in words]
    return words


def _fish(verbs: dict[str, argparse.ArgumentParser]) -> Iterator[str]:
    for verb, parser in verbs.items():
        yield f"complete -c nsa -n __fish_use_subcommand -f -a {verb}"
        for word in _words(parser):
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            yield f"complete -c nsa -n '__fish_seen_subcommand_from {verb}' {kind}"
