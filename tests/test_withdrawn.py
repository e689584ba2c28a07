"""Withdrawn settings, values, flags and verbs: refused by name; old checkpoints still load."""

from pathlib import Path

import pytest

from nsa import withdrawn
from nsa.cli import main
from nsa.engine.config import RunConfig, read_saved_config, resolve_config, to_yaml
from nsa.model.hf_config import NSAConfig


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that no version had."""
    monkeypatch.setitem(withdrawn.SETTINGS, "train.momentum", (0.5, "set train.learning_rate"))
    monkeypatch.setitem(withdrawn.SETTINGS, "model.attention.sinks", (0, withdrawn.REMOVE))
    monkeypatch.setitem(withdrawn.VALUES, ("train.precision", "int8"), "bf16")
    monkeypatch.setitem(withdrawn.FLAGS, "nsa plan --guess", "read the plan")
    monkeypatch.setitem(withdrawn.VERBS, "dance", "walk")
    monkeypatch.setitem(withdrawn.VERBS, "data dance", "walk")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.momentum=0.5", "train.momentum is withdrawn in this version; set train.learning"),
        ("attention.sinks=4", "model.attention.sinks is withdrawn in this version; remove it"),
        ("train.precision=int8", "train.precision = 'int8' is withdrawn .* set it to 'bf16'"),
    ],
)
def test_a_withdrawn_setting_is_refused_with_its_replacement(
    assignment: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"--set {assignment}: {words}"):
        resolve_config(RunConfig(), None, [assignment])
    key, value = assignment.split("=")
    section, name = key.split(".")
    file = tmp_path / "file.yaml"
    file.write_text(f"{section}: {{{name}: {value}}}\n")
    with pytest.raises(ValueError, match=words):
        resolve_config(RunConfig(), file)


def test_a_saved_config_loads_without_its_withdrawn_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    saved = to_yaml(RunConfig()).replace("precision: bf16", "precision: int8\n  momentum: 0.9")
    file.write_text(saved)
    config, lost = read_saved_config(file)
    assert config == RunConfig()
    assert lost == [
        "train.precision = 'int8': withdrawn in this version, which has 'bf16'",
        "train.momentum = 0.9: withdrawn in this version, which has 0.5",
    ]
    file.write_text(saved.replace("momentum: 0.9", "momentum: 0.5").replace("int8", "bf16"))
    assert read_saved_config(file) == (RunConfig(), [])


def test_a_saved_model_that_this_version_cannot_compute_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {init_std: 0.04}\n")
    (line,) = read_saved_config(file)[1]
    assert line == "model.init_std = 0.04: withdrawn in this version, which has 0.02"
    file.write_text("model: {attention: {sinks: 4}}\n")
    with pytest.raises(ValueError, match=r"sinks = 4: .* use the version that trained it"):
        read_saved_config(file)
    with pytest.raises(ValueError, match=r"^config\.json: .*sinks = 4: .* that exported it"):
        NSAConfig(attention={"sinks": 4})


def test_withdrawn_flags_and_verbs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["plan", "--guess=3"], "--guess=3: withdrawn in this version; read the plan"),
        (["plan", "--other=1", "--guess=3"], "--guess=3: withdrawn in this version; read the plan"),
        (["dance", "--fast"], "dance: withdrawn in this version; walk"),
        (["data", "dance", "--fast"], "data dance: withdrawn in this version; walk"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_no_withdrawn_setting_exists() -> None:
    for name, (_, advice) in withdrawn.SETTINGS.items():
        assert advice
        with pytest.raises(ValueError, match=f"{name} is withdrawn"):
            resolve_config(RunConfig(), None, [f"{name}=1"])
        section: object = RunConfig()
        *path, last = name.split(".")
        for part in path:
            section = getattr(section, part)
        assert not hasattr(section, last)
