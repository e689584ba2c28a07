"""Lists in flags and JSON with rows: what the benchmarks read and write."""

from __future__ import annotations

import argparse
import json

import pytest

from tests.bench.formats import row_json, whole_number_list, words, words_of


def test_lists_are_separated_by_commas_without_duplicates() -> None:
    assert whole_number_list("128,512") == [128, 512]
    assert words("b,a,,b") == ["b", "a"]
    assert words_of("a", "b")("b,b,a") == ["b", "a"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"'c': choose from a, b, separated by"):
        words_of("a", "b")("a,c")


def test_json_has_one_line_per_row() -> None:
    result = {"a": 1, "rows": [{"b": [1, 2]}, {"b": None}], "none": []}
    text = row_json(result)
    assert json.loads(text) == result
    assert text.splitlines()[2:5] == [' "rows": [', '  {"b": [1, 2]},', '  {"b": null}']
