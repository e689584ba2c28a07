"""`python -m tests.bench recall`: long-range recall with NSA, dense and window-only attention.

Small models of the same size, one per kind of attention, are trained in plain PyTorch with every
seed and the same number of steps, then evaluated on the same sequences: recall by number of facts,
needles in haystacks of each length at every depth, and sequences twice as long as in training.
Accuracies count facts beyond the windows' reach: with each layer, windows reach another window's
width back. By default half an hour or more on two cores.

    recall     · f f · f · · f  k k k k k k k k   facts in the first half, questions in the second
    needle     · · · · f · · · · · · · f · · k    a fact at a given depth; the question at the end

A fact is a token that encodes a key and a value. A question is a key; its label is the value of the
fact with that key. Keys, values and positions are random in each sequence, so only the facts reveal
the answer.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa.constants import IGNORE_INDEX
from nsa.engine.build import parameter_groups
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.config import COMPRESSORS, INDEXED
from nsa.spec import NSASpec
from nsa.text import markdown_table
from nsa.validation import positive_flags
from tests.bench.harness import Report, margin, words_of

# Token ids in this order: keys, values, fillers, facts.
KEYS = VALUES = FILLERS = 16
FIRST_FACT = KEYS + VALUES + FILLERS
VOCABULARY = FIRST_FACT + KEYS * VALUES  # number of ids

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
INDEX = AttentionConfig(branches="sel", selector_loss=1.0)
VARIANTS = {
    "dense": AttentionConfig(kind="dense"),
    # Like the paper: only the compressed branch trains the keys that rank blocks.
    "nsa": AttentionConfig(),
    "selector loss": AttentionConfig(selector_loss=1.0),
    "cmp+win": AttentionConfig(branches="cmp+win"),
    "win": AttentionConfig(branches="win"),
    "index": INDEX,
}
HALF_DENSE = "half dense index"  # dense for half of its steps, as train.dense_steps does
BATCH = 2_048  # tokens of a step
INIT_STD = 0.125  # 1 / √width: with 0.02 a model this small barely learns at first
LEARNING_RATE = 8e-3
VALUE_RATE = 0.5  # of models with one set of keys and values, as in recipes/m7c.py
WARMUP = 30
FACT_COUNTS = (2, 4, 8, 16)
HAYSTACK_FACTS = 4  # including the needle
DEPTHS = tuple(eighth / 8 for eighth in range(9))
SEQUENCES = 32  # for each accuracy
SEED = 1_000_003  # of the evaluated sequences, which differ from the training sequences

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class TaskBatch:
    """Sequences of one length, [B, T] each."""

    input_ids: Tensor
    labels: Tensor  # the value at a question, else IGNORE_INDEX
    distance: Tensor  # at a question, positions back to its fact; else 0


def recall(rng: torch.Generator, batch: int, seq_len: int, facts: int) -> TaskBatch:
    """Return multi-query associative recall: each position of the second half is a question."""
    half = seq_len // 2
    assert facts <= min(half, KEYS)
    questions = torch.arange(half, seq_len).expand(batch, -1)
    fact_index = torch.randint(facts, (batch, half), generator=rng)
    positions = _distinct(rng, batch, half, facts)
    return _build(rng, seq_len, positions, questions, fact_index)


def needle(rng: torch.Generator, batch: int, seq_len: int, facts: int, depth: float) -> TaskBatch:
    """Return a fact at the fraction `depth` of the context, among filler and other facts.

    The last position is the question.
    """
    context = seq_len - 1
    assert facts <= min(context, KEYS)
    positions = _distinct(rng, batch, context, facts)
    target = round(depth * (context - 1))
    # A fact that lies at the target swaps positions with the needle, which is the first fact.
    positions[:, 1:] = positions[:, 1:].where(positions[:, 1:] != target, positions[:, :1])
    positions[:, 0] = target
    question = torch.full((batch, 1), context)
    return _build(rng, seq_len, positions, question, torch.zeros_like(question))


def _build(
    rng: torch.Generator, seq_len: int, positions: Tensor, questions: Tensor, fact_index: Tensor
) -> TaskBatch:
    """Place facts at `positions` [B, facts]; at `questions` ask for the facts `fact_index`."""
    batch, facts = positions.shape
    keys = _distinct(rng, batch, KEYS, facts)
    values = torch.randint(VALUES, keys.shape, generator=rng)
    ids = KEYS + VALUES + torch.randint(FILLERS, (batch, seq_len), generator=rng)
    ids.scatter_(1, positions, FIRST_FACT + keys * VALUES + values)
    ids.scatter_(1, questions, keys.gather(1, fact_index))
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels.scatter_(1, questions, KEYS + values.gather(1, fact_index))
    distance = torch.zeros_like(ids)
    distance.scatter_(1, questions, questions - positions.gather(1, fact_index))
    return TaskBatch(ids, labels, distance)


def _distinct(rng: torch.Generator, batch: int, below: int, count: int) -> Tensor:
    """Return `count` distinct random numbers below `below`, for each of the batch."""
    return torch.rand(batch, below, generator=rng).argsort(1)[:, :count]


@dataclass(frozen=True)
class Task:
    """What all models learn: recall in sequences of up to `seq_len` tokens."""

    seq_len: int = 256
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
        return recall(rng, max(1, BATCH // seq_len), seq_len, facts)


def model_config(variant: str, task: Task) -> ModelConfig:
    attention = VARIANTS.get(variant, INDEX)
    spec = (INDEX_PATTERNS if attention.has_index else PATTERNS)[task.pattern]
    attention = replace(attention, spec=spec)
    if attention.has_index or (attention.kind == "nsa" and "cmp" in attention.branch_names):
        attention = replace(attention, compressor=task.compressor)
    return ModelConfig(
        vocab_size=VOCABULARY,
        layers=LAYERS,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=HEAD_DIMS[task.pattern],
        mlp_width=64,
        attention=attention,
    )


def train(variant: str, task: Task, steps: int, seed: int) -> tuple[LanguageModel, list[float]]:
    """Train a variant at all lengths with AdamW; return it and the loss of each step."""
    torch.manual_seed(seed)
    model = LanguageModel(model_config(variant, task))
    model.initialize(INIT_STD)
    dense_steps = round(steps / 2) if variant == HALF_DENSE else 0
    rng, losses = torch.Generator().manual_seed(seed), list[float]()
    attention = model.config.attention
    value_rate = VALUE_RATE if attention.kind == "dense" or attention.has_index else 1.0
    groups = parameter_groups(model, 0.01, value_rate)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    model.train()
    for step in range(steps):
        model.set_dense(step < dense_steps)
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        batch = task.batch(rng)
        loss = model(batch.input_ids, labels=batch.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 200 == 199:
            print(f"seed {seed}, step {step + 1}/{steps}, loss {losses[-1]:.3f}", flush=True)
    return model.eval(), losses


@torch.no_grad()
def check_answers(model: Callable[[Tensor], Tensor], batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return, for each question, whether the model predicts the answer, and its fact's distance."""
    questions = batch.labels != IGNORE_INDEX
    correct = model(batch.input_ids).argmax(-1) == batch.labels
    return correct[questions], batch.distance[questions]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=1_000, help="steps per model (%(default)s)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of weights and data (1 2 3)")
    known = words_of(*VARIANTS, HALF_DENSE)
    about = f"some of these, or {HALF_DENSE}, with commas (%(default)s)"
    add("--models", type=known, default=",".join(VARIANTS), help=about)
    add("--seq-len", type=int, default=256, help="tokens of the longest sequences (%(default)s)")
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
    task = Task(flags.seq_len, flags.pattern, flags.compressor)
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
        for row in map(evaluate, pairs) if flags.jobs == 1 else pool.map(evaluate, pairs):
            report.add(row)
            print(f"{row['model']}, seed {row['seed']}: evaluated and saved", flush=True)
    random = f"{report.data['random_selection']:.1%} of {FACT_COUNTS[-1]} facts"
    print(*lines(report.data), f"Random blocks would include {random}.", flags.out, sep="\n")


def _evaluate_pair(task: Task, steps: int, pair: tuple[int, str]) -> dict[str, Any]:
    """Train and evaluate one model: accuracy by facts, in longer sequences, and of needles."""
    torch.set_num_threads(1)  # with tensors this small, more threads only wait
    seed, variant = pair
    model, losses = train(variant, task, steps, seed)
    longest, rng = task.seq_len, torch.Generator().manual_seed(SEED)

    def far(*batches: TaskBatch) -> float | None:
        """Return the accuracy beyond the windows' reach; None if no fact is."""
        checked = [check_answers(model, batch) for batch in batches]
        correct, distance = (torch.cat(parts) for parts in zip(*checked, strict=True))
        beyond = correct[distance > task.reach]
        return round(beyond.double().mean().item(), 4) if len(beyond) else None

    return {
        "model": variant,
        "seed": seed,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss": round(statistics.fmean(losses[-20:]), 4),
        "by_facts": [
            {"facts": facts, "far": far(recall(rng, SEQUENCES, longest, facts))}
            for facts in FACT_COUNTS
        ],
        "needle": [
            {
                "seq_len": length,
                "far": far(*(needle(rng, SEQUENCES, length, HAYSTACK_FACTS, x) for x in DEPTHS)),
            }
            for length in task.lengths
        ],
        # Most facts, in sequences twice as long as in training.
        "twice_as_long": far(recall(rng, SEQUENCES, 2 * longest, FACT_COUNTS[-1])),
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
    return round(fraction.where(~always, 1.0).mean().item(), 4)


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of accuracies beyond the windows' reach.

    Each is the mean over seeds ± half its 95% confidence interval, and the least.
    """
    longest, by_model = result["seq_len"], dict[str, Rows]()
    for row in result["rows"]:
        by_model.setdefault(row["model"], []).append(row)
    facts = [f"{facts} facts" for facts in FACT_COUNTS]
    header = ["model", *facts, f"{facts[-1]}, {2 * longest:,} tokens"]
    header += [f"needles of {longest:,} tokens", "parameters"]
    cells = []
    for name, rows in by_model.items():
        far = [[row["by_facts"][index]["far"] for row in rows] for index in range(len(FACT_COUNTS))]
        far.append([row["twice_as_long"] for row in rows])
        far.append([row["needle"][-1]["far"] or 0.0 for row in rows])
        cells.append([name, *map(_accuracy, far), f"{rows[0]['parameters']:,}"])
    return markdown_table(header, cells)


def _accuracy(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1%}"
    return f"{mean} ± {100 * margin(values):.1f}, least {min(values):.1%}" if values[1:] else mean
