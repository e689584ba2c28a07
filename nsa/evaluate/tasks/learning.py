"""Small models that learn to recall, with one kind of attention or another, and how well they do.

All learn from the same sequences, with the same sizes and as many steps, in plain PyTorch: nothing
here needs a second process. A window's reach grows by its width with each layer, so the facts lie
further back than all layers together reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from nsa.constants import IGNORE_INDEX
from nsa.evaluate.tasks.episodes import VOCABULARY, Episodes, recall
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.attention import NSAttention
from nsa.spec import NSASpec

SPEC = NSASpec(
    block_len=4,
    block_stride=2,
    select_len=4,
    select_top=8,
    init_blocks=1,
    local_blocks=1,
    window=16,
)
LAYERS = 2
REACH = LAYERS * (SPEC.window - 1)  # positions back that a window alone can hear of
# At these lengths the definition is faster than what is made for long ones.
NSA = AttentionConfig(spec=SPEC, backend="reference")
CONTENDERS = {
    "dense": AttentionConfig(kind="dense"),
    # What the selected branch learns to find is at once what blocks are chosen by.
    "nsa": replace(NSA, shared_kv=True),
    # Here the choice learns by the compressed branch alone, which takes longer.
    "nsa, own keys": NSA,
    "cmp+win": replace(NSA, branches="cmp+win"),
    "win": replace(NSA, branches="win"),
}
BATCH = 2_048  # tokens of a step
LEARNING_RATE = 5e-3
WARMUP = 30
SHORTEST = 32  # tokens; a quarter of them at most are facts


@dataclass(frozen=True)
class Learned:
    """A model that has learned, and what that took."""

    model: LanguageModel
    losses: list[float]  # of each step
    seconds: float  # of processors

    def without_choice(self) -> LanguageModel:
        """The same weights, but only the blocks that are always selected are."""
        assert self.model.config.attention.kind == "nsa"
        model = LanguageModel(self.model.config)
        model.load_state_dict(self.model.state_dict())
        for block in model.blocks:
            attention = block.get_submodule("attention")
            assert isinstance(attention, NSAttention)
            always = attention.spec.init_blocks + attention.spec.local_blocks
            attention.spec = replace(attention.spec, select_top=always)
        return model.eval()


def lengths(longest: int) -> list[int]:
    """The lengths that are learned from: the longest, its half, and so on."""
    if longest < 2 * SHORTEST or longest % SHORTEST:
        raise ValueError(
            f"--seq-len {longest}: take a multiple of {SHORTEST}, {2 * SHORTEST} or more"
        )
    found = [longest]
    while found[-1] // 2 >= SHORTEST:
        found.append(found[-1] // 2)
    return found[::-1]


def model_config(name: str) -> ModelConfig:
    """A contender's model: the sizes are those of all."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        layers=LAYERS,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_width=64,
        init_std=0.125,  # 1 / √width: at 0.02 so small a model stands still for long
        attention=CONTENDERS[name],
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small make a second thread wait more than it helps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def learn(
    name: str, longest: int, steps: int, seed: int, tell: Callable[[int, float], None]
) -> Learned:
    """Train a contender on recall at all lengths; `tell` hears of each step and its loss."""
    torch.manual_seed(seed)
    model = LanguageModel(model_config(name))
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    begin, losses = time.process_time(), []
    for step in range(steps):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (1 - 0.9 * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        episodes = lesson(draw, lengths(longest))
        loss = model(episodes.input_ids, labels=episodes.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tell(step + 1, losses[-1])
    return Learned(model.eval(), losses, time.process_time() - begin)


def lesson(draw: torch.Generator, of_lengths: list[int]) -> Episodes:
    """The sequences of one step: a length and a number of facts for all of them."""
    seq_len = of_lengths[_below(draw, len(of_lengths))]
    facts = 2 ** (1 + _below(draw, 3 if seq_len < 2 * SHORTEST else 4))
    return recall(draw, max(1, BATCH // seq_len), seq_len, facts)


@torch.no_grad()
def right(model: LanguageModel, episodes: Episodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each question: is the likeliest token its answer, and how far back is its fact."""
    asked = episodes.labels != IGNORE_INDEX
    answers = model(episodes.input_ids).argmax(-1)
    return (answers == episodes.labels)[asked], episodes.distance[asked]


def _below(draw: torch.Generator, count: int) -> int:
    return int(torch.randint(count, (), generator=draw))
