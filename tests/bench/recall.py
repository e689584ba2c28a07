"""`python -m tests.bench recall`: long-range recall with NSA, dense and window-only attention.

Small models of the same size, one per kind of attention, are trained in plain PyTorch with every
seed and the same number of steps, then evaluated on the same sequences: recall by number of facts
and by distance, needles in haystacks by length and depth, and sequences twice as long as in
training. Accuracies count facts beyond the windows' reach: with each layer, windows reach another
window's width back. By default half an hour or more on two cores.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa.constants import IGNORE_INDEX
from nsa.engine.build import parameter_groups
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.config import COMPRESSORS, INDEXED
from nsa.model.index import add_index
from nsa.spec import NSASpec
from nsa.text import markdown_table
from nsa.validation import positive_flags
from tests.bench.harness import Report, add_seeds, margin, words_of
from tests.bench.recall_data import VALUES, VOCABULARY, TaskBatch, needle, recall
from tests.ops.cases import threads

LAYERS = 2
SHORTEST = 32  # tokens; at most a quarter are facts
PATTERNS = {
    "small": NSASpec(
        block_len=4, block_stride=2, select_len=4, select_top=8, local_blocks=1, window=16
    ),
    "recipe": NSASpec(),
}
INDEX_PATTERNS = {  # as far back without the index as the windows reach
    "small": NSASpec(block_len=4, block_stride=4, select_len=4, select_top=8, local_blocks=4),
    "recipe": INDEXED,
}
# "small": large enough to tell 16 keys apart by the mean of a block. "recipe": M7C's.
HEAD_DIMS = {"small": 32, "recipe": 64}
NSA = AttentionConfig()
VARIANTS = {
    "dense": AttentionConfig(kind="dense"),
    "nsa": NSA,  # like the paper: only the compressed branch trains the keys that rank blocks
    "selector loss": replace(NSA, selector_loss=1.0),
    "cmp+win": replace(NSA, branches="cmp+win"),
    "win": replace(NSA, branches="win"),
    "index": AttentionConfig(branches="sel", selector_loss=1.0),
}
# Dense for half of their steps, as train.dense_steps does.
HALF_DENSE = {"half dense index": "index"}
BATCH = 2_048  # tokens of a step
INIT_STD = 0.125  # 1 / √width: with 0.02 a model this small barely learns at first
LEARNING_RATE = 8e-3
VALUE_RATE = 0.5  # of models with one set of keys and values, as in recipes/m7c.py
WARMUP = 30
# To sparsify: steps as fractions of the dense model's, and rates; of the selector, of all weights.
SPARSIFY_STEPS = 0.03, 0.07
SELECTOR_RATE, SPARSE_RATE = 3e-3, 4e-3
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


@dataclass(frozen=True)
class Task:
    """What all models learn: recall in sequences of up to `seq_len` tokens."""

    seq_len: int = 256
    hops: int = 1  # facts that lead to an answer
    pattern: str = "small"  # in PATTERNS and HEAD_DIMS
    compressor: str = "mean"  # φ of the models with a compressed branch

    def __post_init__(self) -> None:
        if self.seq_len < 2 * SHORTEST or self.seq_len % SHORTEST:
            raise ValueError(
                f"--seq-len {self.seq_len}: take a multiple of {SHORTEST}, {2 * SHORTEST} or more"
            )
        if self.seq_len // 2 <= self.reach:
            raise ValueError(
                f"--seq-len {self.seq_len}: windows of {self.spec.window} tokens reach every fact; "
                f"take {2 * self.reach + 2} or more for --pattern {self.pattern}"
            )

    @property
    def spec(self) -> NSASpec:
        return PATTERNS[self.pattern]

    @property
    def reach(self) -> int:
        """Positions back that windows alone can see."""
        return LAYERS * (self.spec.window - 1)

    @property
    def lengths(self) -> list[int]:
        """The sequence lengths, shortest first: the longest, its half, and so on."""
        lengths = [self.seq_len]
        while lengths[0] // 2 >= SHORTEST:
            lengths.insert(0, lengths[0] // 2)
        return lengths

    def batch(self, rng: torch.Generator) -> TaskBatch:
        """Return the sequences of one step, with a random length and number of facts."""

        def draw(choices: Sequence[int]) -> int:
            return choices[int(torch.randint(len(choices), (), generator=rng))]

        seq_len = draw(self.lengths)
        facts = draw(FACT_COUNTS[:3] if seq_len < 2 * SHORTEST else FACT_COUNTS)
        return recall(rng, max(1, BATCH // seq_len), seq_len, facts, self.hops)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, and the cost of training it."""

    model: LanguageModel
    losses: list[float]  # of each step
    seconds: float  # of CPU time

    def without_selection(self) -> TrainedModel:
        """Return the same weights with only the blocks that are always selected."""
        model = copy.deepcopy(self.model)
        for layer in model.sparse_layers().values():
            forced = layer.spec.init_blocks + layer.spec.local_blocks
            layer.spec = replace(layer.spec, select_top=forced)
        return replace(self, model=model)


def model_config(variant: str, task: Task) -> ModelConfig:
    attention = VARIANTS[HALF_DENSE.get(variant, variant)]
    if attention.has_index:
        spec = INDEX_PATTERNS[task.pattern]
        attention = replace(attention, spec=spec, compressor=task.compressor)
    else:
        attention = replace(attention, spec=task.spec)
    if attention.kind == "nsa" and "cmp" in attention.branch_names:
        attention = replace(attention, compressor=task.compressor)
    return ModelConfig(
        vocab_size=VOCABULARY[task.hops],
        layers=LAYERS,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=HEAD_DIMS[task.pattern],
        mlp_width=64,
        attention=attention,
    )


def train(
    variant: str, task: Task, steps: int, seed: int, on_step: Callable[[int, float], None]
) -> TrainedModel:
    """Train a variant at all lengths; `on_step` receives each step and its loss."""
    torch.manual_seed(seed)
    model = LanguageModel(model_config(variant, task))
    model.initialize(INIT_STD)
    dense_steps = round(steps / 2) if variant in HALF_DENSE else 0
    rates = [
        LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (1 - step / steps) for step in range(steps)
    ]
    return _optimize(model, task, seed, rates, on_step, dense_steps=dense_steps)


@threads(1)  # with tensors this small, more threads only wait
def _optimize(
    model: LanguageModel,
    task: Task,
    seed: int,
    rates: Sequence[float],
    on_step: Callable[[int, float], None],
    selector_only: bool = False,
    dense_steps: int = 0,
) -> TrainedModel:
    """Train with AdamW, a step at each of the rates."""
    rng, losses = torch.Generator().manual_seed(seed), list[float]()
    value_rate = VALUE_RATE if model.config.attention.has_one_set else 1.0
    groups = parameter_groups(model, 0.0 if selector_only else 0.01, value_rate)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    start = time.process_time()
    model.train()
    for step, rate in enumerate(rates):
        model.attend_densely(selector_only or step < dense_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        batch = task.batch(rng)
        loss = model(batch.input_ids, labels=batch.labels, selector_only=selector_only)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        on_step(step + 1, losses[-1])
    return TrainedModel(model.eval(), losses, time.process_time() - start)


def sparsify(
    dense: TrainedModel, task: Task, steps: int, seed: int, on_step: Callable[[int, float], None]
) -> Iterator[tuple[str, TrainedModel]]:
    """Yield the converted model, after its selector's steps, and after sparse training of all.

    `steps` are the dense model's. The sequences are not those of the dense model's training.
    """
    config = model_config("index", task)
    model = LanguageModel(config)
    model.load_state_dict(add_index(dict(dense.model.state_dict()), config))
    yield "converted", TrainedModel(model.eval(), dense.losses, dense.seconds)
    alone, both = (round(x * steps) for x in SPARSIFY_STEPS)
    rates = [SPARSE_RATE * (1 - step / both) for step in range(both)]
    first = _optimize(
        model, task, seed + 1_000, [SELECTOR_RATE] * alone, on_step, selector_only=True
    )
    model.attend_densely(False)
    yield f"after {alone} steps of the selector", first
    second = _optimize(model, task, seed + 2_000, rates, on_step)
    yield f"and {both} of all weights", replace(second, seconds=first.seconds + second.seconds)


@torch.no_grad()
def check_answers(
    model: nn.Module, batch: TaskBatch, hops: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each answer of `hops` tokens, whether the model predicts all, and its distance.

    Each token is predicted after the right earlier ones (teacher forcing). The distance is the
    shortest of the tokens'.
    """
    questions = batch.labels != IGNORE_INDEX
    predicted = model(batch.input_ids).argmax(-1)
    correct = (predicted == batch.labels)[questions].unflatten(0, (-1, hops))
    return correct.all(-1), batch.distance[questions].unflatten(0, (-1, hops)).amin(-1)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=1_000, help="steps per model (%(default)s)")
    add_seeds(parser)
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
    report.data |= {
        **asdict(task),
        "steps": flags.steps,
        "seeds": flags.seeds,
        "reach": task.reach,
        "chance": 1 / VALUES,
        "random_selection": random_selection(task),
        "spec": asdict(task.spec),
    }
    pairs = [(seed, model) for seed in flags.seeds for model in flags.models]
    evaluate = partial(_evaluate_pair, task, flags.steps)
    with ProcessPoolExecutor(flags.jobs, get_context("spawn")) as pool:
        for rows in map(evaluate, pairs) if flags.jobs == 1 else pool.map(evaluate, pairs):
            for row in rows:
                report.add(row)
            print(f"{row['model']}, seed {row['seed']}: evaluated and saved", flush=True)
    random = f"{report.data['random_selection']:.1%} of {FACT_COUNTS[-1]} facts"
    print(*lines(report.data), f"Random blocks would include {random}.", flags.out, sep="\n")


def _evaluate_pair(task: Task, steps: int, pair: Pair) -> Rows:
    seed, variant = pair

    def log(step: int, loss: float) -> None:
        if step % max(1, steps // 4) == 0 or step == steps:
            print(f"{variant}, seed {seed}: step {step}/{steps}, loss {loss:.3f}", flush=True)

    if variant == SPARSIFIED:
        dense = train("dense", task, steps, seed, log)
        rows = [_evaluate_model("dense", seed, dense, task)]
        for name, stage in sparsify(dense, task, steps, seed, log):
            rows.append(_evaluate_model(name, seed, stage, task))
        return rows
    trained = train(variant, task, steps, seed, log)
    rows = [_evaluate_model(variant, seed, trained, task)]
    if variant == "selector loss":
        rows.append(_evaluate_model(WITHOUT_SELECTION, seed, trained.without_selection(), task))
    return rows


@threads(1)
def _evaluate_model(name: str, seed: int, trained: TrainedModel, task: Task) -> dict[str, Any]:
    """Evaluate one model: accuracy by facts, by distance, and of needles by length."""
    model, longest, hops = trained.model, task.seq_len, task.hops
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
        "parameters": sum(weight.numel() for weight in model.parameters()),
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
    return markdown_table(header, cells)


def _accuracy(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1%}"
    return f"{mean} ± {100 * margin(values):.1f}, least {min(values):.1%}" if values[1:] else mean
