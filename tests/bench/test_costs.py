"""The measurements of costs run at tiny sizes and save every figure that the pages show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa.data.config import DataConfig
from nsa.engine.config import RunConfig
from nsa.model import AttentionConfig, ModelConfig
from nsa.spec import NSASpec
from tests.bench import costs
from tests.bench.__main__ import main
from tests.ops.cases import one_thread as one_thread

TINY = ModelConfig(320, 1, 32, 2, 1, 16, mlp_width=32,
                   attention=AttentionConfig(spec=NSASpec(16, 8, 32, 6, window=128)))  # fmt: skip


def figures(name: str, folder: Path) -> dict[str, Any]:
    out = folder / f"{name}.json"
    main(["costs", name, "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["finished"]
    assert result["environment"]["command"].startswith(f"python -m tests.bench costs {name} ")
    return result


def test_cpu_compares_attention_and_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "SEQ_LEN", 128)
    monkeypatch.setattr(costs, "LENGTHS", (64, 128))
    monkeypatch.setattr(costs, "ROUNDS", 2)
    result = figures("cpu", tmp_path)
    for name in ("fp32", "bf16"):
        times = result["attention"][name]
        assert times["nsa_over_sdpa"] == pytest.approx(times["nsa"] / times["sdpa"])
        assert result["layer"][name]["seconds"] > 0
        assert result["matrix_products_gflops"][name] > 0
    per_token = {n: row["us_per_token"] for n, row in result["length"].items()}
    assert result["length"]["128"]["growth"] == pytest.approx(per_token["128"] / per_token["64"])


def test_health_fails_above_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "PAIRS", 2)
    monkeypatch.setattr(costs, "health_cases", lambda: {"tiny": (TINY, 1, 64)})
    monkeypatch.setattr(costs, "LIMIT", 100.0)
    measured = figures("health", tmp_path)["models"]["tiny"]
    low, median, high = measured["on_over_off"]
    assert low <= median <= high
    assert measured["fraction_at_log_every"]["median"] == pytest.approx((median - 1) / 10)
    monkeypatch.setattr(costs, "LIMIT", -100.0)
    with pytest.raises(SystemExit):
        figures("health", tmp_path)
    (failure,) = json.loads((tmp_path / "health.json").read_text())["failures"]
    assert failure.startswith("tiny: recording costs more")


@pytest.mark.full
def test_data_measures_tokenising_loading_and_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = RunConfig(model=TINY, data=DataConfig(seq_len=128))
    for name, value in (("SEQ_LEN", 128), ("MEGABYTES", 1), ("SECONDS", 0.01), ("STEPS", 3),
                        ("recipe_config", lambda profile: demo)):  # fmt: skip
        monkeypatch.setattr(costs, name, value)
    result = figures("data", tmp_path)
    assert set(result["tokenise_mb_per_s"]) == {"byte", "bpe"}
    assert set(result["tokens_per_s"]) == {"prepared", "streamed"}
    assert 0 < result["step"]["fraction"] < 1
    assert result["prepare_mb_per_s"] > 0
