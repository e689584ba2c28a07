"""Files of others: no pipe blocks, no nesting overflows, no escape reaches a terminal."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa import untrusted
from nsa.text import printable


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"is no regular file|Is a directory"):
            untrusted.read_text(path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert untrusted.read_text(tmp_path / "link") == "text"
    with pytest.raises(OSError, match=r"/proc/self/mem") as refused:  # fails while it is read
        untrusted.read_text(Path("/proc/self/mem"))
    assert refused.value.errno == errno.EIO


@pytest.mark.parametrize("depth", [100, 900, 20_000])
def test_deep_nesting_is_a_value_error(depth: int) -> None:
    for parse, text in (
        (untrusted.parse_json, "[" * depth + "]" * depth),
        (untrusted.parse_json, '{"a": [], "b":' * depth + "1" + "}" * depth),
        (untrusted.parse_yaml, "[" * depth + "]" * depth),
    ):
        with pytest.raises(ValueError, match=r"nested too deeply"):
            parse(text)


def test_a_file_that_would_fill_the_memory_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", untrusted.MAX_TEXT_BYTES + 1)
    with pytest.raises(ValueError, match=r"sparse: has more than 268,435,456 bytes"):
        untrusted.read_text(tmp_path / "sparse")
    (tmp_path / "file").write_text("text")
    assert untrusted.read_text(tmp_path / "file", limit=4) == "text"
    os.truncate(tmp_path / "file", untrusted.MAX_RUN_FILE_BYTES + 1)
    assert untrusted.text_or_empty(tmp_path / "file") == ""
    with pytest.raises(ValueError, match=r"it has more than 262,144 characters"):
        untrusted.parse_yaml("a: " + "b" * 2**18)


def test_json_of_the_greatest_depth_is_read() -> None:
    tree = json.loads("[" * 99 + "1" + "]" * 99)
    assert untrusted.parse_json(json.dumps(tree)) == tree


@pytest.mark.parametrize(
    ("text", "number"),
    [("0123", 83), ("-010", -8), ("1:30", 90), ("1:30.5", 90.5), ("0x1F", 31), ("0b11", 3)],
)
def test_a_number_that_is_not_decimal_is_refused_with_its_value(text: str, number: float) -> None:
    for yaml in (text, f"{{steps: {text}}}", f"{{{text}: name}}"):
        with pytest.raises(ValueError, match=rf"'{text}' is {number} in YAML 1\.1; write a d"):
            untrusted.parse_yaml(yaml)
    assert untrusted.parse_yaml(f"'{text}'") == text


def test_decimal_numbers_are_read() -> None:
    numbers = "[0, -5, +7, 1_000, 0.5, -0.25, .5, 1.5e+3, 30]"
    assert untrusted.parse_yaml(numbers) == [0, -5, 7, 1000, 0.5, -0.25, 0.5, 1500.0, 30]


@pytest.mark.parametrize("text", ["1:" * 2_000 + "1", "1:" * 2_000 + "1.0", "0" * 5_000 + "7"])
def test_a_number_of_any_length_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^not YAML: .* is not decimal in YAML 1\.1; write"):
        untrusted.parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, é, 中文, नमस्ते, \u200d\u200c", None),  # joiners are part of some scripts
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("one\nline\r", r"one\nline\r"),
        ("\x9b31m \u202egnp.exe \u2028", r"\x9b31m \u202egnp.exe \u2028"),
        ("\x7f\u2066a\u2069", r"\x7f\u2066a\u2069"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_become_escapes(text: str, expected: str | None) -> None:
    assert printable(text) == (text if expected is None else expected)


@pytest.mark.parametrize(
    ("value", "shape", "expected"),
    [
        *((number, int, 0 <= number < 2**62) for number in (-1, 0, 2**62 - 1, 2**62)),
        *((value, int, False) for value in (True, 1.0, "1", None)),
        *((value, float, value == 0.5) for value in (0.5, math.nan, math.inf, 1)),
        *((value, (str, type(None)), value != 1) for value in ("", None, 1)),
        *((value, [int], "" not in value) for value in ([], [1, 2], [1, ""], [""])),
        ({"a": 1, "b": ""}, {str: int}, False),
        ({"a": 1, "b": ""}, {"a": int}, True),
        ({"a": 1, "b": ""}, {"a": int, "c": str}, False),
        ([], {"a": int}, False),
    ],
)
def test_a_value_has_a_shape_or_not(value: object, shape: object, expected: bool) -> None:
    assert untrusted.matches(value, shape) == expected


def test_an_error_that_quotes_a_file_is_safe(tmp_path: Path, refusal: Callable[..., str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"\x1b]0;owned\x07\nnsa: fine": 1}))
    error = refusal("check", file)  # one line
    assert r"ds.json: \x1b]0;owned\x07\nnsa: fine = 1" in error
    assert "\x1b" not in error
