"""Hostile values, and what every command must do with them: end soon, with at most one line."""

import contextlib
import copy
import io
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from nsa import cli

CPU_SECONDS = 5.0
WAITING_SECONDS = 30.0  # more: the machine may be busy
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**30, -(10**400), 0.5, -0.0),
    *(1e308, float("inf"), float("-inf"), float("nan")),
    *("", "0", "any", "3", "\0", "\n", ESCAPE, "\ud800", "é" * 300, "x" * 5_000, "1e400"),
    *("../../etc/passwd", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", ".", "~"),
    *("<script>alert(1)</script>", "[a](http://a)", "| a |", "`id`", "$(id)", "{0.__class__}"),
    *("!!python/object/apply:os.system [id]", "__class__", "hf:/nowhere", "hf: "),
    *([], {}, [[]], [{}], {"": None}, {"__class__": 1, "self": 2}, list(range(300))),
)
# What a terminal obeys, but for line ends, tabs, and the carriage returns of progress bars.
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def values() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    trees = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=5,
    )
    return st.sampled_from(VALUES) | st.integers(0, 400).map(nested) | trees


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """A JSON tree with one to three values replaced, removed or added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        if not places:
            break
        parent, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add")))
        if action == "replace":
            parent[key] = copy.deepcopy(draw(values()))
        elif action == "remove":
            del parent[key]
        elif isinstance(parent, dict):
            key = draw(st.text(max_size=8) | st.sampled_from(("x", "self", "\0")))
            parent[key] = copy.deepcopy(draw(values()))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a tree with each of its keys, without recursion."""
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            for key in list(item) if isinstance(item, dict) else range(len(item)):
                yield item, key
                stack.append(item[key])


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes of a file that were cut, replaced, repeated or inserted into."""
    start = draw(st.integers(0, len(content)))
    stop = draw(st.integers(start, min(len(content), start + 64)))
    middle = draw(
        st.sampled_from((b"", b"\0", b"[" * 5_000, b'{"a":' * 2_000, b"\xff\xfe", b"9" * 5_000))
        | st.binary(max_size=32)
    )
    end = draw(st.sampled_from((content[stop:], b"", content)))
    return content[:start] + middle + end


def to_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def files(tree: Any) -> st.SearchStrategy[bytes]:
    """Content of a JSON file that should hold `tree`."""
    return st.one_of(mutated(tree).map(to_json), mutated(tree).map(to_json), damaged(to_json(tree)))


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Fail after CPU_SECONDS of computing, or WAITING_SECONDS of waiting, wherever the code is."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, CPU_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WAITING_SECONDS),
    )
    for number, timer, seconds in timers:
        signal.signal(number, fail)
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, timer, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, signal.SIG_DFL)


def run(*arguments: str | Path, exact_stdout: bool = False) -> int:
    """Call `nsa` in this process: it ends in time; an error is one line without escapes.

    An exception that the command does not handle fails the test. Return the exit code.
    """
    out, err = io.StringIO(), io.StringIO()
    with time_limit(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit:  # of argparse
            code = int(exit.code or 0)
    assert code in (0, 1, 2)
    lines = [line for line in err.getvalue().split("\n") if line.startswith("nsa: ")]
    errors = [line for line in lines if not line.startswith("nsa: warning: ")]
    assert len(errors) == (code == 2), err.getvalue()
    for text in (err.getvalue(), "" if exact_stdout else out.getvalue()):
        assert not OBEYED.search(text), repr(text)
    return code
