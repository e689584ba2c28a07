"""The comparison on text: trains with the recipe, evaluates unseen files, pairs seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.bench import runs, text
from tests.bench.__main__ import main
from tests.engine.runs import TINY
from tests.ranks import FORKING

LENGTH = 64


def source(folder: Path) -> Path:
    """Files of different words, so that some are held out; each repeats its words."""
    folder.mkdir()
    for number in range(60):
        words = " ".join(f"word{number}x{k % 7}" for k in range(80))
        (folder / f"{number}.txt").write_text(words)
    return folder


def test_each_model_is_trained_evaluated_and_compared_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "subprocess", FORKING)
    monkeypatch.setattr(text, "LENGTH", LENGTH)
    monkeypatch.setattr(text, "PLACES", (0, 16, 32, 48, LENGTH))
    monkeypatch.setattr(text, "NEAR", 8)  # ends before a repeat
    tiny = [flag for flag in TINY if "seq_len" not in flag]
    settings = [*tiny, f"--set=data.seq_len={LENGTH}", "--set=model.vocab_size=300"]
    settings += ["--set=data.held_out=0.2"]
    command = ["text", f"--source={source(tmp_path / 'source')}", f"--runs={tmp_path / 'runs'}"]
    command += ["--models=nsa,dense", "--seeds=3", "--steps=2", *settings]
    command += [f"--out={tmp_path / 'text.json'}"]
    main(command)
    result = json.loads((tmp_path / "text.json").read_text())
    assert result["failures"] == []
    nsa, dense = (result["losses"][name]["3"] for name in ("nsa", "dense"))
    places = ["all", "0 to 16", "16 to 32", "32 to 48", "48 to 64", "far repeats", "repeats"]
    assert list(nsa) == list(dense) == places
    assert nsa["all"] != dense["all"]
    assert nsa["repeats"] == dense["repeats"] > 0
    assert nsa["all"] == pytest.approx(sum(nsa[place] for place in places[1:5]) / 4, rel=1e-5)
    table = capsys.readouterr().out
    assert f"{dense['all']:.3f}; {dense['all'] - nsa['all']:+.3f} ± 0.000" in table
    (tmp_path / "runs/nsa-seed3/text.json").write_text(json.dumps(dense))
    main(command)  # trains and evaluates nothing again
    assert f"{dense['all']:.3f}; +0.000" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--runs .* has different settings .* the --steps of"):
        main([*command, "--steps=3"])
    with pytest.raises(SystemExit):
        main([*command, f"--runs={tmp_path / 'others'}", "--limit=1"])
    message = "nsa, seed 3 was not started: --limit reached; the same command continues"
    assert message in capsys.readouterr().out


def test_a_far_repeat_is_a_rare_token_whose_last_place_is_before_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids from 10 on are rare. Places are of labels: label t is token t + 1."""
    monkeypatch.setattr(text, "PLACES", (0, 10, 20, 30, 40))
    monkeypatch.setattr(text, "RARE", 0.3)
    monkeypatch.setattr(text, "NEAR", 8)
    row = [number % 3 for number in range(41)]
    row[5], row[36] = 11, 11  # far
    row[28], row[33] = 12, 12  # near
    row[24], row[32] = 15, 15  # the first of the window's eight
    row[26], row[35] = 16, 16  # one before them
    row[39] = 13  # new
    row[2], row[29] = 14, 14  # far, but not in the last quarter
    far = text.far_repeats(torch.tensor([row]))
    assert far.nonzero().tolist() == [[0, 34], [0, 35]]
