"""Roofline counts against masks counted position by position, and the tables in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.bench.__main__ import main
from nsa.bench.options import Shape
from nsa.bench.roofline import PEAKS, token_bytes, work
from nsa.ops.reference import visible_blocks
from nsa.ops.triton import configs
from nsa.spec import NSASpec

SPEC = NSASpec(4, 2, 4, 3, 1, 1, 7)
SHAPE = Shape("toy", 4, 2, 16, 8)
BATCH, SEQ_LEN = 3, 29
PAGE = Path(__file__).parents[2] / "docs/benchmarks/kernel-counts.md"


def visible_pairs() -> dict[str, int]:
    """Query-key pairs of one head and sequence, from the definitions' masks."""
    position = torch.arange(SEQ_LEN)
    distance = position[:, None] - position
    causal = distance >= 0
    # Which blocks are selected depends on the scores; the number of positions does not.
    block = position // SPEC.select_len
    selected = torch.where(block[:, None] < SPEC.select_top, block < SPEC.select_top, block < 2)
    own = block[:, None] == block
    return {
        "compressed": int(visible_blocks(SEQ_LEN, SPEC).sum()),
        "window": int((causal & (distance < SPEC.window)).sum()),
        "selected": int((causal & (selected | own)).sum()),
    }


# Operations for elements of 16 and 8: s and o; s, dp and dq; s, dv, dp and dk; these and dq.
FORWARD, QUERIES, KEYS, ALL = (2 * x for x in (16 + 8, 16 + 8 + 16, 16 + 8 + 8 + 16, 64))


@pytest.mark.parametrize(
    ("head", "kernel", "products"),
    [
        (64, "gated forward", {"compressed": FORWARD, "window": FORWARD}),
        (64, "gated queries", {"window": QUERIES}),
        (64, "gated keys", {"compressed": ALL, "window": KEYS}),
        (0, "gated queries", {"compressed": QUERIES, "window": QUERIES}),
        (0, "gated keys", {"compressed": KEYS, "window": KEYS}),
        (64, "selected forward", {"selected": FORWARD}),
        (64, "selected queries", {"selected": QUERIES}),
        (64, "selected keys", {"selected": KEYS}),
    ],
)
def test_flops_are_those_of_the_visible_pairs(
    head: int, kernel: str, products: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All compressed keys fit one tile, or with `head` 0 no heads do."""
    monkeypatch.setattr(configs, "ONE_TILE_HEAD", head)
    item = work(SHAPE, BATCH, SEQ_LEN, SPEC)[kernel]
    pairs = {branch: visible_pairs()[branch] * BATCH * SHAPE.heads for branch in products}
    assert item.exps == sum(pairs.values())
    assert item.flops == sum(pairs[branch] * products[branch] for branch in products)


def test_selection_costs_nothing_while_every_block_is_selected() -> None:
    select = work(SHAPE, 1, SPEC.select_len * SPEC.select_top, SPEC)["select"]
    assert (select.flops, select.exps) == (0, 0)


def test_a_floor_is_the_slowest_of_products_exponentials_and_memory() -> None:
    chip = PEAKS["A100"]
    for item in work(SHAPE, BATCH, SEQ_LEN, SPEC).values():
        seconds, what = item.floor(chip)
        times = {
            "products": item.flops / chip.flops,
            "exponentials": item.exps / chip.exps,
            "memory": item.bytes / chip.bytes,
        }
        assert times[what] == seconds == max(times.values())


@pytest.mark.parametrize(
    ("name", "branch"), [("cmp", "compressed"), ("win", "window"), ("sel", "selected")]
)
def test_decoding_reads_the_keys_of_the_visible_pairs(name: str, branch: str) -> None:
    read = sum(token_bytes(SHAPE, t + 1, SPEC)[name] for t in range(SEQ_LEN))
    assert read == visible_pairs()[branch] * SHAPE.kv_heads * (16 + 8) * 2


def test_the_token_tables_of_the_page_are_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["roofline", "--token", "--lengths", "1k,4k,16k,64k"])
    printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    for part in "\n".join(printed).split("\n\n"):
        assert part in PAGE.read_text()


@pytest.mark.parametrize(("shape", "length"), [("m7c", "2k"), ("64x4x128", "64k")])
def test_the_tables_of_the_page_are_what_the_command_prints(
    shape: str, length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["roofline", "--shapes", shape, "--lengths", length])
    printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert "\n".join(printed) in PAGE.read_text()
