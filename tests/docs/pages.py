"""Documentation pages, split into code blocks, commands and prose for the tests."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import ROOT

PAGES = [
    page
    for page in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "ds_configs/README.md",
    )
    if page.exists()
]
FRAMEWORKS = ROOT / "docs/guides/frameworks.md"  # its scripts run one by one
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"^    ((?:bash|deepspeed|nsa|python|tensorboard) .*)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block; `output` is the `text` block right below it, which shows what it prints."""

    page: Path
    line: int
    language: str
    text: str
    output: str | None


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, and its indented commands."""
    text = page.read_text()
    result = []
    for fence in FENCE.finditer(text):
        below = re.match(r"\n\n```text\n(.*?)^```$", text[fence.end() :], re.M | re.S)
        line = text.count("\n", 0, fence.start()) + 1
        output = below[1] if below else None
        result.append(Block(page, line, fence[1], fence[2], output))
    unfenced = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for command in INDENTED.finditer(unfenced):
        line = unfenced.count("\n", 0, command.start()) + 1
        result.append(Block(page, line, "bash", command[1], None))
    return result


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a `bash` block as words, without comments and leading NAME=value."""
    lines = block.text.replace("\\\n", " ").replace("&&", "\n").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [_without_variables(words) for words in split if words]


def name(path: Path) -> str:
    """Return a file's path from the repository's root."""
    return path.relative_to(ROOT).as_posix()


def _without_variables(words: list[str]) -> list[str]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words
