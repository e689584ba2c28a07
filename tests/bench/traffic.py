"""`python -m tests.bench traffic`: operations and bytes of a micro-batch of M7C, without a GPU.

`tests/operations.py` begins with the definitions. Counts, and no estimate of a time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nsa.model import ModelConfig
from nsa.model.config import ACTIVATION_CHECKPOINTING, COMPRESSORS
from tests.bench.harness import Report, print_table
from tests.bench.train import KINDS
from tests.operations import PARTS, Operation, record_operations


def totals(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Return a row per part that has operations, and the total."""
    parts = {part: [x for x in operations if x.part == part] for part in PARTS}
    return [
        {
            "part": part,
            "operations": len(members),
            "bytes": sum(x.bytes for x in members),
            "launches": sum(len(x.launches) for x in members),
            "launch_bytes": sum(y.bytes for x in members for y in x.launches),
        }
        for part, members in [*parts.items(), ("total", operations)]
        if members
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--micro-batch", type=int, default=8, help="sequences (%(default)s)")
    add("--seq-len", type=int, default=2_048, help="tokens of a sequence (%(default)s)")
    add("--checkpointing", choices=ACTIVATION_CHECKPOINTING, default="none", help="(%(default)s)")
    add("--compressor", choices=COMPRESSORS, default="mean", help="of three branches (%(default)s)")
    add("--selector-loss", action="store_true", help="count the selector loss too")


def run(report: Report) -> dict[str, Any]:
    """Count three branches, an index, its dense steps, and the dense twin; print tables."""
    flags, result = report.flags, dict[str, Any]()
    print(f"{flags.micro_batch} x {flags.seq_len:,} tokens, checkpointing {flags.checkpointing}")
    weight = float(flags.selector_loss)
    indexed = replace(KINDS["index"], selector_loss=weight)
    models = {
        "nsa": replace(KINDS["nsa"], compressor=flags.compressor, selector_loss=weight),
        "index": indexed,
        "index, dense steps": indexed,
        "dense": KINDS["dense"],
    }
    for kind, attention in models.items():
        config = ModelConfig(attention=attention, activation_checkpointing=flags.checkpointing)
        dense = kind.endswith("dense steps")
        operations = record_operations(config, flags.micro_batch, flags.seq_len, dense)
        rows = totals(operations)
        result[kind] = [{"kind": kind, **row} for row in rows]
        lines = [[kind, "operations", "GB", "launches", "their GB"]]
        for row in rows:
            cells = [f"{row['operations']:,}", f"{row['bytes'] / 1e9:.2f}", f"{row['launches']:,}"]
            lines.append([row["part"], *cells, f"{row['launch_bytes'] / 1e9:.2f}"])
        print_table(lines)
    return result
