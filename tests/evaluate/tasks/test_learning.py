"""Small models learn from the tasks, see as far as they should, and are judged by their answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nsa.constants import IGNORE_INDEX
from nsa.evaluate.tasks import learning
from nsa.evaluate.tasks.episodes import recall
from nsa.evaluate.tasks.learning import (
    CONTENDERS,
    LAYERS,
    REACH,
    SPEC,
    Learned,
    learn,
    lengths,
    lesson,
    model_config,
    one_thread,
    right,
)
from nsa.model import LanguageModel

LENGTH = 64


def heard(model: LanguageModel) -> list[int]:
    """From how many positions back a change of one token changes what the last position says."""
    ids = torch.randint(40, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    others = ids + torch.eye(LENGTH, dtype=torch.int64).flip(1)  # the row: how far back it changes
    with one_thread(), torch.no_grad():
        said = model(torch.cat([ids, others]))[:, -1]
    return [back for back in range(LENGTH) if not said[0].equal(said[1 + back])]


def made(name: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(model_config(name)).eval()


def test_a_window_hears_from_its_reach_and_no_further() -> None:
    assert heard(made("win")) == list(range(REACH + 1))


@pytest.mark.parametrize("name", ["dense", "nsa", "nsa, own keys", "cmp+win"])
def test_the_others_hear_from_everywhere(name: str) -> None:
    assert heard(made(name)) == list(range(LENGTH))


def test_without_choice_the_weights_are_the_same_and_only_forced_blocks_are_read() -> None:
    learned = Learned(made("nsa"), [], 0.0)
    model = learned.without_choice()
    for name, weight in learned.model.state_dict().items():
        assert model.state_dict()[name].equal(weight)
    tops = [
        [block.attention.spec.select_top for block in one.blocks] for one in (learned.model, model)
    ]
    assert tops == [[SPEC.select_top] * LAYERS, [SPEC.init_blocks + SPEC.local_blocks] * LAYERS]


def test_contenders_differ_in_their_attention_alone() -> None:
    configs = [model_config(name) for name in CONTENDERS]
    for config in configs[1:]:
        config.attention = configs[0].attention
    assert all(config == configs[0] for config in configs)


def test_learning_lowers_the_loss_and_the_same_seed_learns_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learning, "BATCH", 256)
    heard: list[tuple[int, float]] = []
    first = learn("win", 64, 40, 5, lambda step, loss: heard.append((step, loss)))
    assert heard == list(enumerate(first.losses, 1))
    assert sum(first.losses[-10:]) / 10 < first.losses[0] - 1
    assert learn("win", 64, 3, 5, lambda *_: None).losses[0] == first.losses[0]


def test_lessons_come_in_every_length_with_as_many_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {lesson(draw, lengths(256)).input_ids.shape for _ in range(60)}
    assert shapes == {(learning.BATCH // length, length) for length in (32, 64, 128, 256)}


class Oracle(nn.Module):
    """Answers as it is told."""

    def __init__(self, answers: Tensor) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.one_hot(self.answers, 320).float()


def test_questions_are_judged_and_nothing_else() -> None:
    episodes = recall(torch.Generator().manual_seed(0), 4, 32, 4)
    answers = episodes.labels.where(episodes.labels != IGNORE_INDEX, 0)
    found, distance = right(Oracle(answers), episodes)
    assert found.all()
    assert len(found) == 4 * 16
    assert distance.equal(episodes.distance[:, 16:].flatten())
    answers[:, 24:] += 1
    found, _ = right(Oracle(answers), episodes)
    assert found.double().mean() == 0.5


@pytest.mark.parametrize("longest", [0, 32, 100, -64])
def test_lengths_that_cannot_be_halved_are_refused(longest: int) -> None:
    with pytest.raises(ValueError, match=rf"--seq-len {longest}: take a multiple of 32"):
        lengths(longest)
