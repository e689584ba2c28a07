"""What the small models have learned: recall by facts and by distance, and a grid of needles."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from nsa.evaluate.tasks.episodes import VALUES, needle, recall
from nsa.evaluate.tasks.learning import (
    CONTENDERS,
    REACH,
    SPEC,
    Learned,
    learn,
    lengths,
    model_config,
    one_thread,
    right,
)
from nsa.model import LanguageModel, parameter_count
from nsa.report.markdown import spread, table

WITHOUT_CHOICE = "nsa, no choice"  # tested with the blocks alone that are always selected
FACTS = (2, 4, 8, 16)
HAY = 4  # facts of a haystack, the needle among them
DEPTHS = tuple(at / 8 for at in range(9))
SEQUENCES = 32  # of each cell
DRAW = 1_000_003  # seed of the test's sequences: none of them is learned from

Tell = Callable[[str, int, int, float], None]  # contender, seed, step, loss
Pair = tuple[int, str]  # seed, contender
Rows = list[dict[str, Any]]


def examine(
    longest: int, steps: int, seeds: Sequence[int], jobs: int, tell: Tell
) -> dict[str, Any]:
    """Train every contender with every seed, and ask all of them the same questions.

    So many `jobs` at a time, each in a process of its own where they are several; `tell` is then
    called there.
    """
    one = partial(_examined, longest, steps, tell)
    pairs = [(seed, name) for seed in seeds for name in CONTENDERS]
    found = [one(pair) for pair in pairs] if jobs == 1 else _side_by_side(one, pairs, jobs)
    rows = [row for rows in found for row in rows]
    return {
        "torch": torch.__version__,
        "seq_len": longest,
        "steps": steps,
        "seeds": list(seeds),
        "reach": REACH,
        "chance": 1 / VALUES,
        "spec": asdict(SPEC),
        "rows": rows,
    }


def _side_by_side(one: Callable[[Pair], Rows], pairs: Sequence[Pair], jobs: int) -> list[Rows]:
    """Each in a process of its own. Whoever ends this ends them too."""
    others = set(multiprocessing.active_children())
    asked: list[int] = []  # signals while workers are started, which nothing may interrupt
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN  # nohup stays nohup
    }
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            # Ctrl-C reaches all processes of a terminal; these inherit that they do not hear it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            waiting = [pool.submit(one, pair) for pair in pairs]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for number in before:
                signal.signal(number, signal.default_int_handler)
            if asked:
                raise KeyboardInterrupt
            return [future.result() for future in waiting]
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()  # nor is begun what waits for one
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _examined(longest: int, steps: int, tell: Tell, pair: Pair) -> Rows:
    seed, name = pair
    learned = learn(name, longest, steps, seed, partial(tell, name, seed))
    rows = [_row(name, seed, learned, learned.model, longest)]
    if name == "nsa":
        rows.append(_row(WITHOUT_CHOICE, seed, learned, learned.without_choice(), longest))
    return rows


@one_thread()
def _row(
    name: str, seed: int, learned: Learned, model: LanguageModel, longest: int
) -> dict[str, Any]:
    by_facts, distances = [], []
    draw = torch.Generator().manual_seed(DRAW)
    for facts in FACTS:
        found, distance = right(model, recall(draw, SEQUENCES, longest, facts))
        far = distance > REACH
        by_facts.append({"facts": facts, "all": _share(found), "far": _share(found[far])})
        distances.append((found, distance))
    answers, distance = (torch.cat(parts) for parts in zip(*distances, strict=True))
    edges = [1, *(2**power for power in range(3, longest.bit_length()))]
    return {
        "model": name,
        "seed": seed,
        "parameters": parameter_count(model_config(_trained_as(name))),
        "seconds": round(learned.seconds, 1),
        "loss": statistics.fmean(learned.losses[-20:]),
        "by_facts": by_facts,
        "by_distance": [
            {"from": low, "below": high, "right": _share(answers[inside])}
            for low, high in zip(edges, [*edges[1:], longest], strict=True)
            if (inside := (distance >= low) & (distance < high)).any()
        ],
        "needle": [
            {"seq_len": length, "depth": depth, **_needle(model, draw, length, depth)}
            for length in lengths(longest)
            for depth in DEPTHS
        ],
    }


def _needle(
    model: LanguageModel, draw: torch.Generator, length: int, depth: float
) -> dict[str, float]:
    found, distance = right(model, needle(draw, SEQUENCES, length, HAY, depth))
    return {"distance": int(distance[0]), "right": _share(found)}


def _share(found: torch.Tensor) -> float:
    return found.double().mean().item()


def _trained_as(name: str) -> str:
    return "nsa" if name == WITHOUT_CHOICE else name


def by_model(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each model, one a seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["model"], []).append(row)
    return found


def lines(result: Mapping[str, Any]) -> list[str]:
    """A Markdown table: the share of right answers beyond a window's reach."""
    longest, reach = result["seq_len"], result["reach"]
    heads = [
        "model",
        *(f"{facts} facts" for facts in FACTS),
        f"needles of {longest} tokens",
        "parameters",
        "seconds",
    ]
    cells = []
    for name, rows in by_model(result).items():
        far = [[row["by_facts"][at]["far"] for row in rows] for at in range(len(FACTS))]
        needles = [
            statistics.fmean(
                cell["right"]
                for cell in row["needle"]
                if cell["seq_len"] == longest and cell["distance"] > reach
            )
            for row in rows
        ]
        seconds = statistics.fmean(row["seconds"] for row in rows)
        shares = [spread(values, ".1%") for values in [*far, needles]]
        cells.append([name, *shares, f"{rows[0]['parameters']:,}", f"{seconds:.0f}"])
    return table(heads, cells)
