"""Train every variant with every seed; evaluate and plot recall and needles in haystacks."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import signal
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa.evaluate.tasks.data import VALUES, needle, recall
from nsa.evaluate.tasks.train import (
    Task,
    TrainedModel,
    check_answers,
    model_config,
    one_thread,
    train,
)
from nsa.model import LanguageModel, parameter_count
from nsa.report.markdown import table
from nsa.report.paired import margin
from nsa.report.plots import Panel, draw

# The model trained with the selector loss, restricted to the blocks that are always selected.
WITHOUT_SELECTION = "selector loss, no choice"
FACTS = (2, 4, 8, 16)
HAYSTACK_FACTS = 4  # including the needle
DEPTHS = tuple(eighth / 8 for eighth in range(9))
SEQUENCES = 32  # per accuracy
SEED = 1_000_003  # of the evaluated sequences, which differ from the training sequences

OnStep = Callable[[str, int, int, float], None]  # variant, seed, step, loss
OnResult = Callable[[dict[str, Any]], None]
Pair = tuple[int, str]  # seed, variant
Rows = list[dict[str, Any]]


def evaluate_variants(
    variants: Sequence[str],
    task: Task,
    steps: int,
    seeds: Sequence[int],
    jobs: int,
    on_step: OnStep,
    on_result: OnResult,
) -> dict[str, Any]:
    """Train each of `variants` with every seed, and evaluate all on the same sequences.

    With several `jobs`, each model is trained in a separate process, which calls `on_step`.
    `on_result` receives the result so far after each model.
    """
    run = partial(_evaluate_pair, task, steps, on_step)
    pairs = [(seed, variant) for seed in seeds for variant in variants]
    result: dict[str, Any] = {
        "torch": torch.__version__,
        **asdict(task),
        "steps": steps,
        "seeds": list(seeds),
        "reach": task.reach,
        "chance": 1 / VALUES,
        "spec": asdict(task.spec),
        "rows": [],
    }

    def add(rows: Rows) -> None:
        result["rows"] += rows
        on_result(result)

    if jobs == 1:
        for pair in pairs:
            add(run(pair))
    else:
        _run_parallel(run, pairs, jobs, add)
    return result


def _run_parallel(
    run: Callable[[Pair], Rows], pairs: Sequence[Pair], jobs: int, on_rows: Callable[[Rows], None]
) -> None:
    """Run each pair in a process; SIGINT and SIGTERM end them all at once."""
    others = set(multiprocessing.active_children())
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            # Signals must not interrupt the start of workers. Workers inherit the blocked signals,
            # because a terminal sends Ctrl-C to them as well.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            futures = [pool.submit(run, pair) for pair in pairs]
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for future in futures:
                on_rows(future.result())
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()  # pending pairs are then not started either
            raise
        finally:
            signal.signal(signal.SIGTERM, handler)


def _evaluate_pair(task: Task, steps: int, on_step: OnStep, pair: Pair) -> Rows:
    seed, variant = pair
    trained = train(variant, task, steps, seed, partial(on_step, variant, seed))
    rows = [_row(variant, variant, seed, trained, trained.model, task)]
    if variant == "selector loss":
        model = trained.without_selection()
        rows.append(_row(WITHOUT_SELECTION, variant, seed, trained, model, task))
    return rows


@one_thread()
def _row(
    name: str, variant: str, seed: int, trained: TrainedModel, model: LanguageModel, task: Task
) -> dict[str, Any]:
    """Evaluate one model: accuracy by facts, by distance, and of needles by length and depth."""
    longest, hops = task.seq_len, task.hops
    by_facts, results = [], []
    rng = torch.Generator().manual_seed(SEED)
    for facts in FACTS:
        correct, distance = check_answers(model, recall(rng, SEQUENCES, longest, facts, hops))
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
    correct, distance = check_answers(model, recall(rng, SEQUENCES, 2 * longest, FACTS[-1], hops))
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


def _mean(correct: torch.Tensor) -> float:
    return correct.double().mean().item()


def by_model(result: Mapping[str, Any]) -> dict[str, Rows]:
    rows: dict[str, Rows] = {}
    for row in result["rows"]:
        rows.setdefault(row["model"], []).append(row)
    return rows


def has_needles(result: Mapping[str, Any]) -> bool:
    return any(row["needle"] for row in result["rows"])


def far_needles(row: Mapping[str, Any], seq_len: int, reach: int) -> float | None:
    """Return the accuracy on needles beyond the windows' reach, at one length."""
    far = [c["right"] for c in row["needle"] if c["seq_len"] == seq_len and c["distance"] > reach]
    return statistics.fmean(far) if far else None


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of accuracies beyond the windows' reach.

    Mean over seeds, half the width of its 95% confidence interval, and the least.
    """
    longest, reach = result["seq_len"], result["reach"]
    facts = [f"{facts} facts" for facts in FACTS]
    header = ["model", *facts, f"{facts[-1]}, {2 * longest:,} tokens"]
    header += [f"needles of {longest:,} tokens"] if has_needles(result) else []
    header += ["parameters", "seconds"]
    cells = []
    for name, rows in by_model(result).items():
        far = [[row["by_facts"][index]["far"] for row in rows] for index in range(len(FACTS))]
        seconds = statistics.fmean(row["seconds"] for row in rows)
        far.append([row["twice_as_long"] for row in rows])
        if has_needles(result):
            far.append([far_needles(row, longest, reach) or 0.0 for row in rows])
        cells.append([name, *map(_accuracy, far), f"{rows[0]['parameters']:,}", f"{seconds:.0f}"])
    return table(header, cells)


def _accuracy(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1%}"
    return f"{mean} ± {100 * margin(values):.1f}, least {min(values):.1%}" if values[1:] else mean


def summary_json(result: Mapping[str, Any]) -> str:
    """Return tasks.json: results of each model and seed, one row per line.

    Needle accuracies are averaged at each length: over all depths, and beyond the reach.
    """
    rows = []
    for row in result["rows"]:
        accuracies: dict[int, list[float]] = {}  # by length
        for cell in row["needle"]:
            accuracies.setdefault(cell["seq_len"], []).append(cell["right"])
        needles = [
            {
                "seq_len": length,
                "all": statistics.fmean(values),
                "far": far_needles(row, length, result["reach"]),
            }
            for length, values in accuracies.items()
        ]
        text = json.dumps({**row, "needle": needles})
        rounded = json.loads(text, parse_float=lambda number: round(float(number), 4))
        rows.append(f"  {json.dumps(rounded)}")
    fields = [f" {json.dumps(key)}: {json.dumps(result[key])}" for key in result if key != "rows"]
    return "{\n" + ",\n".join([*fields, ' "rows": [\n' + ",\n".join(rows) + "\n ]"]) + "\n}\n"


def draw_recall(result: Mapping[str, Any], out: Path) -> None:
    """Plot accuracy over the distance to the fact and over the number of facts; means of seeds."""
    by_distance, by_facts = {}, {}
    for name, rows in by_model(result).items():
        distance = _means(
            (cell["from"], cell["right"]) for row in rows for cell in row["by_distance"]
        )
        facts = _means((cell["facts"], cell["far"]) for row in rows for cell in row["by_facts"])
        by_distance[name] = (list(distance), list(distance.values()))
        by_facts[name] = (list(facts), list(facts.values()))
    common: dict[str, Any] = {"marked": True, "x_doubles": True, "fraction": True}
    draw(
        [
            Panel("accuracy", by_distance, x="positions back to the fact, from", **common),
            Panel("accuracy beyond the reach of windows", by_facts, x="facts", **common),
        ],
        out,
    )


def draw_needle(result: Mapping[str, Any], out: Path) -> None:
    """Plot a grid for each model: depth of the needle by length of the context; means of seeds."""
    from matplotlib.figure import Figure  # late: it takes a second

    models = by_model(result)
    columns = min(3, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(2.7 * columns + 0.9, 2.9 * lines), dpi=100, layout="constrained")
    axes = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for axis in axes[len(models) :]:
        axis.set_axis_off()
    for axis, (name, rows) in zip(axes, models.items(), strict=False):
        cells = _means(
            ((cell["depth"], cell["seq_len"]), cell["right"])
            for row in rows
            for cell in row["needle"]
        )
        depths, lengths = (sorted(set(values)) for values in zip(*cells, strict=True))
        grid = [[cells[depth, length] for length in lengths] for depth in depths]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_title(name, fontsize="medium")
        axis.set_xlabel("tokens")
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    figure.supylabel("depth of the needle", fontsize="medium")
    figure.colorbar(image, ax=axes, label="accuracy")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _means(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    values: dict[Any, list[float]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return {key: statistics.fmean(values[key]) for key in sorted(values)}
