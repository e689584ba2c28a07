"""Train every variant with every seed; evaluate recall and needles in haystacks."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import statistics
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from nsa.evaluate.tasks.data import needle, recall
from nsa.evaluate.tasks.train import (
    Task,
    TrainedModel,
    check_answers,
    model_config,
    one_thread,
    sparsify,
    train,
)
from nsa.model import LanguageModel, parameter_count

# The model trained with the selector loss, restricted to the blocks that are always selected.
WITHOUT_SELECTION = "selector loss, no choice"
SPARSIFIED = "sparsified"  # a dense model, converted and trained on
FACT_COUNTS = (2, 4, 8, 16)
HAYSTACK_FACTS = 4  # including the needle
DEPTHS = tuple(eighth / 8 for eighth in range(9))
SEQUENCES = 32  # for each accuracy
SEED = 1_000_003  # of the evaluated sequences, which differ from the training sequences

Pair = tuple[int, str]  # seed, variant
Rows = list[dict[str, Any]]


def evaluate_all(
    task: Task, steps: int, pairs: Sequence[Pair], jobs: int
) -> Generator[Rows, None, None]:
    """Train a model per pair and evaluate all on the same sequences; yield the rows of each.

    With several `jobs` models are trained in worker processes, which SIGINT and SIGTERM kill.
    """
    run = partial(_evaluate_pair, task, steps)
    if jobs == 1:
        yield from map(run, pairs)
        return
    earlier = set(multiprocessing.active_children())
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            # Signals must not interrupt the start of workers. Workers inherit the blocked signals,
            # because a terminal sends Ctrl-C to them as well.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                futures = [pool.submit(run, pair) for pair in pairs]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for future in futures:
                yield future.result()
        except BaseException:
            for worker in set(multiprocessing.active_children()) - earlier:
                worker.kill()  # pending pairs are then not started either
            raise
        finally:
            signal.signal(signal.SIGTERM, handler)


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


@one_thread()
def _evaluate_model(
    name: str, variant: str, seed: int, trained: TrainedModel, model: LanguageModel, task: Task
) -> dict[str, Any]:
    """Evaluate one model: accuracy by facts, by distance, and of needles by length and depth."""
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
    lengths = task.lengths if hops == 1 else []  # a needle is one fact
    for length, depth in itertools.product(lengths, DEPTHS):
        batch = needle(rng, SEQUENCES, length, HAYSTACK_FACTS, depth)
        correct, distance = check_answers(model, batch)
        cell = {"seq_len": length, "depth": depth, "distance": int(distance[0])}
        needles.append({**cell, "right": _mean(correct)})
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
        "loss": statistics.fmean(trained.losses[-20:]),
        "by_facts": by_facts,
        "twice_as_long": twice,  # most facts, in sequences twice as long as in training
        "by_distance": [
            {"from": low, "below": high, "right": _mean(correct[inside])}
            for low, high in zip(edges, [*edges[1:], longest], strict=True)
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
    return correct.double().mean().item()
