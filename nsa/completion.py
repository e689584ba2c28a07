"""Shell completion of `nsa`: verbs, and each verb's flags and choices, from the parser itself.

eval "$(nsa completion bash)"          or zsh; nsa completion fish | source
"""

from __future__ import annotations

import argparse

from nsa.validation import subcommands

SHELLS = ("bash", "zsh", "fish")
# Where no word matches, bash and zsh complete file names.
BASH = """\
_nsa() {{
    local words verb="${{COMP_WORDS[1]}}"
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
FISH = "complete -c nsa -n {condition} -a '{words}'\n"


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that makes `shell` complete the words of `parser`."""
    words = {verb: " ".join(_words(each)) for verb, each in subcommands(parser).items()}
    verbs = " ".join(words)
    if shell == "fish":
        script = FISH.format(condition="__fish_use_subcommand -f", words=verbs)
        for verb in words:
            condition = f"'__fish_seen_subcommand_from {verb}'"
            script += FISH.format(condition=condition, words=words[verb])
        return script
    cases = "\n".join(f'    {verb}) words="{words[verb]}" ;;' for verb in words)
    return (ZSH if shell == "zsh" else "") + BASH.format(cases=cases, verbs=verbs)


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Return a verb's long flags, and the words that its positional arguments can be."""
    words: list[str] = []
    for action in parser._actions:
        words += action.option_strings[-1:] or [str(word) for word in action.choices or ()]
    inner = [word for each in subcommands(parser).values() for word in _words(each)]
    return list(dict.fromkeys(words + inner))
