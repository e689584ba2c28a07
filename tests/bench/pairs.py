"""`python -m tests.bench pairs RUN`: pairs of query and key that the kernels compute over needed.

A tile of neighbouring queries visits the union of their selected blocks; a tile of the keys' kernel
has queries of one block. Needed are the positions up to a query in its own blocks. Counted with
M7C's six query heads per KV head, on a trained run's selections in its validation split.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from nsa.data.cache import cache_folder
from nsa.data.dataset import open_dataset
from nsa.engine.load_run import load_run
from nsa.evaluate.perplexity import eval_batches, open_eval_data
from nsa.spec import NSASpec
from tests.bench.harness import Report, cell, print_table

GROUP, ROWS = 6, (32, 64, 128)  # query heads per KV head; rows of a tile
LENGTHS, TOKENS = (2_048, 8_192), 32_768  # of a sequence; of all, per length


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a trained run")


def run(report: Report) -> None:
    """Print and save the means of all layers and sequences of each length."""
    stored = load_run(report.flags.run, device="cpu", dtype=torch.float32)
    assert stored.tokenizer is not None
    counts, spec = list[dict[str, float]](), stored.config.model.attention.spec
    for layer in stored.model.sparse_layers().values():
        layer.observer = lambda gates, index, *_: counts.append(count(index[0], spec))
    for length in LENGTHS:
        dataset = open_dataset(replace(stored.config.data, seq_len=length, packing="concat"))
        cache = cache_folder(stored.config.data, stored.folder)
        data = open_eval_data(dataset, "val", TOKENS, stored.tokenizer, cache)
        for batch, *_ in eval_batches(data, length, length, 1):
            stored.model.hidden(batch.input_ids)
        report.add({x: sum(y[x] for y in counts) / len(counts) for x in counts[0]})
        counts.clear()
    rows = report.data["rows"]
    print_table([list(rows[0]), *([cell(x) for x in row.values()] for row in rows)])


def count(index: torch.Tensor, spec: NSASpec) -> dict[str, float]:
    """Return executed over needed pairs of a sequence's block_index [T, Hkv, n]."""
    length, blocks = len(index), spec.select_blocks_len(len(index))
    selected = torch.zeros(*index.shape[:2], blocks + 1, dtype=torch.bool)  # the last is no block
    selected = selected.scatter(2, index.long() % (blocks + 1), True)[..., :blocks]
    kept = (selected[1:] & selected[:-1]).sum() / selected[:-1].sum()
    pairs = {}
    for rows in ROWS:
        tiles = pad(selected, (0, 0, 0, 0, 0, -length % (rows // GROUP)))
        pairs[f"{rows} rows"] = tiles.unflatten(0, (-1, rows // GROUP)).any(1).sum() * rows
    pairs["keys' kernel"] = (selected.sum(0) * GROUP / 64).ceil().sum() * 64  # tiles of 64 rows
    needed = sum(map(spec.visible_selected, range(length))) * index.shape[1] * GROUP
    ratios = {name: x.item() * spec.select_len / needed for name, x in pairs.items()}
    return {"tokens": length, "kept by the next query": kept.item(), **ratios}
