"""`model.activation_checkpointing=auto`: resolved before a run starts, and never again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nsa.engine import command_line
from nsa.engine.micro_batch import batch_of, model_of, zero_of
from nsa.engine.plan_command import load_profile
from nsa.engine.run_request import Recipe, RunRequest
from nsa.planner.forecast import required
from nsa.planner.memory import memory
from tests.ranks import ROOT


def request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpu_memory: float | None, *flags: str
) -> RunRequest:
    """The production run of m7c.py on two GPUs of this many bytes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    profile = load_profile(ROOT / "recipes/m7c.py", "production")
    recipe = Recipe("m7c", "", {"production": lambda: profile})
    monkeypatch.setattr(command_line, "_gpu_memory", lambda: gpu_memory)
    parser = command_line.build_parser(recipe)
    arguments = ["--profile=production", f"--run-dir={folder}", *flags]
    return command_line.resolve_request(recipe, parser.parse_args(arguments))


def mode_and_note(request: RunRequest) -> tuple[str, str]:
    """The mode in the run folder's config.yaml, and the lines of the log that name it."""
    written = yaml.safe_load(request.config_files()["config.yaml"])
    mode = written["model"]["activation_checkpointing"]
    assert mode == request.config.model.activation_checkpointing
    return mode, "\n".join(x for x in request.notes if x.startswith("activation checkpointing"))


def needed(mode: str) -> float:
    """Bytes of GPU memory that the production run needs in this mode, on two ranks."""
    config = load_profile(ROOT / "recipes/m7c.py", "production")
    zero = zero_of(command_line.DEFAULT_DS_CONFIG, config, 2)
    batch = replace(batch_of(config), checkpointing=mode)
    return required(memory(model_of(config), zero, batch, 2))


@pytest.mark.parametrize("mode", ["none", "selective", "reentrant"])
def test_production_takes_the_fastest_mode_that_fits_and_logs_why(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_memory = 1.001 * needed(mode)
    written, note = mode_and_note(request(tmp_path, monkeypatch, gpu_memory))
    assert written == mode
    assert note.startswith(f"activation checkpointing: {mode} (needs about ")
    assert f" of {gpu_memory / 1e9:.1f} GB; " in note
    assert "lower" not in note


def test_80_gb_need_no_recomputation() -> None:
    assert needed("reentrant") < needed("selective") < needed("none") < 80e9


def test_too_little_memory_for_any_mode_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, note = mode_and_note(request(tmp_path, monkeypatch, 3e9))
    assert mode == "reentrant"
    assert note.endswith("; does not fit: lower train.micro_batch)")


def test_without_a_gpu_nothing_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, note = mode_and_note(request(tmp_path, monkeypatch, None))
    assert (mode, note) == ("none", "activation checkpointing: none (there is no GPU)")


def test_a_mode_that_is_set_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--set=model.activation_checkpointing=reentrant"
    assert mode_and_note(request(tmp_path, monkeypatch, 80e9, flag)) == ("reentrant", "")


def test_a_resumed_run_keeps_its_mode_on_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = 1.001 * needed("selective")
    for name, text in request(tmp_path, monkeypatch, small).config_files().items():
        (tmp_path / name).write_text(text)
    assert mode_and_note(request(tmp_path, monkeypatch, 80e9, "--resume")) == ("selective", "")


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        ("m7c", "auto"),
        ("m7c_dense", "auto"),
        ("m7c_classic", "reentrant"),
        ("m7c_32k", "reentrant"),
    ],
)
def test_the_mode_of_each_recipe(recipe: str, mode: str) -> None:
    config = load_profile(ROOT / f"recipes/{recipe}.py", "production")
    assert config.model.activation_checkpointing == mode
