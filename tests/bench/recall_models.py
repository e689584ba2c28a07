"""Small models trained on recall in plain PyTorch, one for each kind of attention.

All have the same sizes, sequences and number of steps. With each layer, windows reach another
window's width back; only answers to facts beyond that reach count.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from nsa.constants import IGNORE_INDEX
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.config import INDEXED
from nsa.model.index import add_index
from nsa.spec import NSASpec
from tests.bench.recall_data import VOCABULARY, TaskBatch, recall
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
HALF_DENSE = {"half dense": "selector loss", "half dense index": "index"}
BATCH = 2_048  # tokens of a step
INIT_STD = 0.125  # 1 / √width: with 0.02 a model this small barely learns at first
LEARNING_RATE = 8e-3
WARMUP = 30
# To sparsify: steps as fractions of the dense model's, and rates; of the selector, of all weights.
SPARSIFY_STEPS = 0.03, 0.07
SELECTOR_RATE, SPARSE_RATE = 3e-3, 4e-3


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
        seq_len = self.lengths[_random_below(rng, len(self.lengths))]
        facts = 2 ** (1 + _random_below(rng, 3 if seq_len < 2 * SHORTEST else 4))
        return recall(rng, max(1, BATCH // seq_len), seq_len, facts, self.hops)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, and the cost of training it."""

    model: LanguageModel
    losses: list[float]  # of each step
    seconds: float  # of CPU time

    def without_selection(self) -> LanguageModel:
        """Return the same weights with only the blocks that are always selected."""
        model = copy.deepcopy(self.model)
        for layer in model.sparse_layers().values():
            forced = layer.spec.init_blocks + layer.spec.local_blocks
            layer.spec = replace(layer.spec, select_top=forced)
        return model


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
    decay = 0.0 if selector_only else 0.01
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=decay)
    start = time.process_time()
    model.train()
    if dense_steps:
        model.start_dense()
    for step, rate in enumerate(rates):
        model.attend_densely(selector_only or step < dense_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
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


def _random_below(rng: torch.Generator, count: int) -> int:
    return int(torch.randint(count, (), generator=rng))
