"""Task models: how far each variant sees, training, and scoring of answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nsa.constants import IGNORE_INDEX
from nsa.engine.plan_command import load_profile
from nsa.evaluate.tasks import train as training
from nsa.evaluate.tasks.data import VOCABULARY, recall
from nsa.evaluate.tasks.train import (
    LAYERS,
    VARIANTS,
    Task,
    TrainedModel,
    check_answers,
    model_config,
    one_thread,
    train,
)
from nsa.model import LanguageModel
from tests.ranks import ROOT

LENGTH = 64
TASK = Task(LENGTH)


def visible_distances(model: LanguageModel) -> list[int]:
    """Return from how many positions back one token changes the last position's output."""
    ids = torch.randint(40, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    others = ids + torch.eye(LENGTH, dtype=torch.int64).flip(1)  # row n: changed n back
    with one_thread(), torch.no_grad():
        outputs = model(torch.cat([ids, others]))[:, -1]
    return [back for back in range(LENGTH) if not outputs[0].equal(outputs[1 + back])]


def build(name: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(model_config(name, TASK)).eval()


def test_a_window_sees_up_to_its_reach() -> None:
    assert visible_distances(build("win")) == list(range(TASK.reach + 1))


@pytest.mark.parametrize("name", ["dense", "nsa", "cmp+win"])
def test_the_other_variants_see_everything(name: str) -> None:
    assert visible_distances(build(name)) == list(range(LENGTH))


def test_without_selection_weights_are_the_same_and_only_forced_blocks_are_selected() -> None:
    trained = TrainedModel(build("nsa"), [], 0.0)
    model = trained.without_selection()
    for name, weight in trained.model.state_dict().items():
        assert model.state_dict()[name].equal(weight)
    tops = [
        [block.attention.spec.select_top for block in one.blocks] for one in (trained.model, model)
    ]
    assert tops == [
        [TASK.spec.select_top] * LAYERS,
        [TASK.spec.init_blocks + TASK.spec.local_blocks] * LAYERS,
    ]


def test_variants_differ_in_attention_only() -> None:
    configs = [model_config(name, TASK) for name in VARIANTS]
    for config in configs[1:]:
        config.attention = configs[0].attention
    assert all(config == configs[0] for config in configs)


def test_training_lowers_the_loss_and_is_a_function_of_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "BATCH", 256)
    reported: list[tuple[int, float]] = []
    first = train("win", TASK, 40, 5, lambda step, loss: reported.append((step, loss)))
    assert reported == list(enumerate(first.losses, 1))
    assert sum(first.losses[-10:]) / 10 < first.losses[0] - 1
    assert train("win", TASK, 3, 5, lambda *_: None).losses[0] == first.losses[0]


def test_training_batches_have_every_length_and_the_same_tokens() -> None:
    rng = torch.Generator().manual_seed(0)
    shapes = {Task(256).batch(rng).input_ids.shape for _ in range(60)}
    assert shapes == {(training.BATCH // length, length) for length in (32, 64, 128, 256)}


class Oracle(nn.Module):
    """A model that predicts the given tokens."""

    def __init__(self, answers: Tensor) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.one_hot(self.answers, VOCABULARY[2]).float()


def test_only_questions_are_scored() -> None:
    batch = recall(torch.Generator().manual_seed(0), 4, 32, 4)
    answers = batch.labels.where(batch.labels != IGNORE_INDEX, 0)
    correct, distance = check_answers(Oracle(answers), batch)
    assert correct.all()
    assert len(correct) == 4 * 16
    assert distance.equal(batch.distance[:, 16:].flatten())
    answers[:, 24:] += 1
    correct, _ = check_answers(Oracle(answers), batch)
    assert correct.double().mean() == 0.5


def test_two_hops_are_correct_if_both_tokens_are() -> None:
    batch = recall(torch.Generator().manual_seed(0), 1, 32, 8, hops=2)
    answers = batch.labels.clamp(min=0)
    answers[0, 16] += 1  # the first answer's first token
    answers[0, 19] += 1  # the second answer's second token
    correct, distance = check_answers(Oracle(answers), batch, hops=2)
    assert correct.tolist() == [False, False] + [True] * 6
    first, second = batch.distance[0, 16::2], batch.distance[0, 17::2]
    assert distance.equal(torch.minimum(first, second))


@pytest.mark.parametrize("longest", [0, 32, 100, -64])
def test_lengths_that_cannot_be_halved_are_refused(longest: int) -> None:
    with pytest.raises(ValueError, match=rf"--seq-len {longest}: take a multiple of 32"):
        Task(longest)


def test_windows_that_reach_every_fact_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--seq-len 1024: windows of 512 .* take 2046 or more"):
        Task(1_024, pattern="recipe")


def test_the_recipes_pattern_and_head_size_are_the_production_recipes() -> None:
    recipe = load_profile(ROOT / "recipes/m7c.py", "production").model
    model = model_config("nsa", Task(2_048, pattern="recipe"))
    assert model.attention.spec == recipe.attention.spec
    assert model.head_dim == recipe.head_dim


def test_the_compressor_is_that_of_all_models_with_a_compressed_branch() -> None:
    task = Task(LENGTH, compressor="mlp")
    compressors = {name: model_config(name, task).attention.compressor for name in VARIANTS}
    assert compressors == dict.fromkeys(VARIANTS, "mlp") | {"dense": "mean", "win": "mean"}
    for name in VARIANTS:
        LanguageModel(model_config(name, task))
