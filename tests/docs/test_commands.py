"""Every command and every Python block of the pages does what the page says."""

import contextlib
import io
from pathlib import Path

import pytest

from tests.docs.commands import check
from tests.docs.pages import FRAMEWORKS, PAGES, Block, blocks, commands, name, prose
from tests.ranks import ROOT

pytestmark = pytest.mark.usefixtures("counted_once")
# A block in another language would not be checked.
LANGUAGES = {"bash", "python", "text", "yaml", "json", "diff"}  # diff: test_guides.py
CLIENTS = {"peft", "trl"}  # TRL needs Python 3.11
SHELL = [block for page in PAGES for block in blocks(page) if block.language == "bash"]
PYTHON = [
    page
    for page in PAGES
    if page != FRAMEWORKS and any(block.language == "python" for block in blocks(page))
]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh clone as the working folder, without runs."""
    for path in ROOT.iterdir():
        if path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def location(block: Block) -> str:
    return f"{name(block.page)}:{block.line}"


@pytest.mark.parametrize("block", SHELL, ids=location)
def test_the_commands_of_the_pages_work(block: Block, clone: Path) -> None:
    for other in blocks(block.page):
        title, _, rest = other.text.partition("\n")
        if other.language == "yaml" and title.startswith("# "):
            (clone / title.removeprefix("# ")).write_text(rest)  # a file the reader has written
    printed = [check(words) for words in commands(block)]
    if block.output is not None and None not in printed:
        assert "".join(printed) == block.output


@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_the_python_of_the_pages_prints_what_they_say(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(page):
        if block.language != "python":
            continue
        lines = "\n" * block.line + block.text  # so that a traceback names the page's line
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                exec(compile(lines, str(page), "exec"), namespace)
            except ModuleNotFoundError as error:
                if error.name not in CLIENTS:
                    raise
                pytest.skip(f"{location(block)} needs {error.name}: pip install -e '.[eval]'")
        assert printed.getvalue() == (block.output or ""), location(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_known_language(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, location(block)
    assert "```" not in prose(page), "a fence that is not closed, or not at the line's start"


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf runs",
        "bash launch/nowhere.sh",
        "deepspeed --gpus 2 recipes/m7c.py",
        "deepspeed --num_gpus 2 recipes/m7c.py --stepz 3",
        "python recipes/m7c_dense.py --profile huge",
        "bash launch/m7c.sh --set train.stepz=3",
        "bash launch/test.sh --fulll",
        "nsa plan --gpuz 8",
        "python -m tests.bench decode --turns 2",
        "nsa bench traffic",
    ],
)
def test_a_command_that_would_fail_is_refused(command: str, clone: Path) -> None:
    with pytest.raises((ValueError, OSError)):
        check(command.split())
