"""`python -m tests.bench recall`: long-range recall with NSA, dense and window-only attention.

Every model is trained with every seed, then evaluated on the same sequences: recall by number of
facts and by distance, needles in haystacks by length and depth, and sequences twice as long as in
training. Accuracies count facts beyond the windows' reach. By default half an hour or more on two
cores.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from nsa.model import LanguageModel, parameter_count
from nsa.model.config import COMPRESSORS
from nsa.report.markdown import table
from nsa.validation import positive_flags
from tests.bench.formats import whole_number_list, words_of
from tests.bench.harness import Report
from tests.bench.intervals import margin
from tests.bench.recall_data import VALUES, needle, recall
from tests.bench.recall_models import (
    HALF_DENSE,
    PATTERNS,
    VARIANTS,
    Task,
    TrainedModel,
    check_answers,
    model_config,
    sparsify,
    train,
)
from tests.ops.cases import threads

# The model trained with the selector loss, restricted to the blocks that are always selected.
WITHOUT_SELECTION = "selector loss, no choice"
SPARSIFIED = "sparsified"  # a dense model, converted and trained on
OTHERS = (*HALF_DENSE, SPARSIFIED)  # not among the default
FACT_COUNTS = (2, 4, 8, 16)
HAYSTACK_FACTS = 4  # including the needle
DEPTHS = tuple(eighth / 8 for eighth in range(9))
SEQUENCES = 32  # for each accuracy
SEED = 1_000_003  # of the evaluated sequences, which differ from the training sequences

Pair = tuple[int, str]  # seed, variant
Rows = list[dict[str, Any]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=1_000, help="steps per model (%(default)s)")
    about = "every model is trained with each; with spaces or commas (1 2 3)"
    add("--seeds", type=whole_number_list, nargs="+", default=[[1, 2, 3]], help=about)
    about = f"some of these, or {', '.join(OTHERS)}, with commas (%(default)s)"
    add("--models", type=words_of(*VARIANTS, *OTHERS), default=",".join(VARIANTS), help=about)
    add("--seq-len", type=int, default=256, help="tokens of the longest sequences (%(default)s)")
    add("--hops", type=int, choices=(1, 2), default=1, help="facts needed for an answer (1)")
    about = "sizes of blocks, windows and heads: small (blocks of 4) or M7C's (%(default)s)"
    add("--pattern", choices=PATTERNS, default="small", help=about)
    add("--compressor", choices=COMPRESSORS, default="mean", help="φ of NSA (%(default)s)")
    add("--jobs", type=int, default=1, help="models trained in parallel (%(default)s)")
    about = "folder for tasks.json (runs/tasks)"
    add("--out", type=lambda text: Path(text, "tasks.json"), default="runs/tasks", help=about)


def run(report: Report) -> None:
    """Train and evaluate every model; save after each one, print a table."""
    flags = report.flags
    positive_flags(flags, "steps", "seq_len", "jobs")
    task = Task(flags.seq_len, flags.hops, flags.pattern, flags.compressor)
    seeds = [seed for group in flags.seeds for seed in group]
    report.data |= {
        **asdict(task),
        "steps": flags.steps,
        "seeds": seeds,
        "reach": task.reach,
        "chance": 1 / VALUES,
        "random_selection": random_selection(task),
        "spec": asdict(task.spec),
    }
    pairs = [(seed, model) for seed in seeds for model in flags.models]
    for rows in evaluate_all(task, flags.steps, pairs, flags.jobs):
        for row in rows:
            report.add(row)
        print(f"{row['model']}, seed {row['seed']}: evaluated and saved", flush=True)
    random = f"{report.data['random_selection']:.1%} of {FACT_COUNTS[-1]} facts"
    print(*lines(report.data), f"Random blocks would include {random}.", flags.out, sep="\n")


def evaluate_all(task: Task, steps: int, pairs: Sequence[Pair], jobs: int) -> Iterator[Rows]:
    """Train a model per pair and evaluate all on the same sequences; yield the rows of each."""
    run = partial(_evaluate_pair, task, steps)
    if jobs == 1:
        yield from map(run, pairs)
    else:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            yield from pool.map(run, pairs)


def _evaluate_pair(task: Task, steps: int, pair: Pair) -> Rows:
    seed, variant = pair

    def log(step: int, loss: float) -> None:
        if step % max(1, steps // 4) == 0 or step == steps:
            print(f"{variant}, seed {seed}: step {step}/{steps}, loss {loss:.3f}", flush=True)

    if variant == SPARSIFIED:
        dense = train("dense", task, steps, seed, log)
        rows = [_evaluate_model("dense", "dense", seed, dense, dense.model, task)]
        for name, stage in sparsify(dense, task, steps, seed, log):
            row = _evaluate_model(name, "selector loss", seed, stage, stage.model, task)
            rows.append(row)
        return rows
    trained = train(variant, task, steps, seed, log)
    rows = [_evaluate_model(variant, variant, seed, trained, trained.model, task)]
    if variant == "selector loss":
        model = trained.without_selection()
        rows.append(_evaluate_model(WITHOUT_SELECTION, variant, seed, trained, model, task))
    return rows


@threads(1)
def _evaluate_model(
    name: str, variant: str, seed: int, trained: TrainedModel, model: LanguageModel, task: Task
) -> dict[str, Any]:
    """Evaluate one model: accuracy by facts, by distance, and of needles by length."""
    longest, hops = task.seq_len, task.hops
    by_facts, results = [], []
    rng = torch.Generator().manual_seed(SEED)
    for facts in FACT_COUNTS:
        batch = recall(rng, SEQUENCES, longest, facts, hops)
        correct, distance = check_answers(model, batch, hops)
        far = distance > task.reach
        by_facts.append({"facts": facts, "all": _mean(correct), "far": _mean(correct[far])})
        results.append((correct, distance))
    needles = []
    for length in task.lengths if hops == 1 else []:  # a needle is one fact
        checked = [
            check_answers(model, needle(rng, SEQUENCES, length, HAYSTACK_FACTS, depth))
            for depth in DEPTHS
        ]
        far = [correct for correct, distance in checked if distance[0] > task.reach]
        accuracy = _mean(torch.cat([correct for correct, _ in checked]))
        accuracies = {"all": accuracy, "far": _mean(torch.cat(far)) if far else None}
        needles.append({"seq_len": length, **accuracies})
    batch = recall(rng, SEQUENCES, 2 * longest, FACT_COUNTS[-1], hops)
    correct, distance = check_answers(model, batch, hops)
    twice = _mean(correct[distance > task.reach])
    correct, distance = (torch.cat(parts) for parts in zip(*results, strict=True))
    edges = [1, *(2**power for power in range(3, longest.bit_length()))]
    return {
        "model": name,
        "seed": seed,
        "parameters": parameter_count(model_config(variant, task)),
        "seconds": round(trained.seconds, 1),
        "loss": round(statistics.fmean(trained.losses[-20:]), 4),
        "by_facts": by_facts,
        "twice_as_long": twice,  # most facts, in sequences twice as long as in training
        "by_distance": [
            {"from": low, "below": high, "right": _mean(correct[inside])}
            for low, high in itertools.pairwise([*edges, longest])
            if (inside := (distance >= low) & (distance < high)).any()
        ],
        "needle": needles,
    }


def random_selection(task: Task) -> float:
    """Return how often randomly selected blocks would include a fact beyond the windows' reach."""
    spec, rng = task.spec, torch.Generator().manual_seed(SEED)
    distance = recall(rng, SEQUENCES, task.seq_len, FACT_COUNTS[-1]).distance
    far = distance > task.reach
    query = torch.arange(task.seq_len).expand_as(distance)[far]
    own = query // spec.select_len
    block = (query - distance[far]) // spec.select_len
    always = (block < spec.init_blocks) | (block > own - spec.local_blocks)
    forced = spec.init_blocks + spec.local_blocks
    free = (own + 1 - forced).clamp(min=1)  # blocks to select the others from
    fraction = ((spec.select_top - forced) / free).clamp(max=1.0)
    return _mean(fraction.where(~always, 1.0))


def _mean(correct: torch.Tensor) -> float:
    return round(correct.double().mean().item(), 4)


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of accuracies beyond the windows' reach.

    Each is the mean over seeds ± half its 95% confidence interval, and the least.
    """
    longest, by_model = result["seq_len"], dict[str, Rows]()
    for row in result["rows"]:
        by_model.setdefault(row["model"], []).append(row)
    has_needles = any(row["needle"] for row in result["rows"])
    facts = [f"{facts} facts" for facts in FACT_COUNTS]
    header = ["model", *facts, f"{facts[-1]}, {2 * longest:,} tokens"]
    header += [f"needles of {longest:,} tokens"] * has_needles + ["parameters", "seconds"]
    cells = []
    for name, rows in by_model.items():
        far = [[row["by_facts"][index]["far"] for row in rows] for index in range(len(FACT_COUNTS))]
        seconds = statistics.fmean(row["seconds"] for row in rows)
        far.append([row["twice_as_long"] for row in rows])
        if has_needles:
            far.append([row["needle"][-1]["far"] or 0.0 for row in rows])
        cells.append([name, *map(_accuracy, far), f"{rows[0]['parameters']:,}", f"{seconds:.0f}"])
    return table(header, cells)


def _accuracy(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1%}"
    return f"{mean} ± {100 * margin(values):.1f}, least {min(values):.1%}" if values[1:] else mean
