"""Mistakes around a run: its DeepSpeed JSON, a second run in its folder, garbage in its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engine.runs import TINY, losses, on_one_rank, refused
from tests.faults.conftest import Golden
from tests.faults.harness import SETTINGS, start
from tests.faults.table import Outcomes
from tests.ranks import ROOT

GOOD = (ROOT / "ds_configs/zero1_pcie.json").read_text()
MISTAKES = {
    "no JSON": ("{", "config.json"),
    "a misspelt key": (GOOD.replace('"zero_optimization"', '"zero_optimisation"'), "zero_optim"),
    "another number than the recipe's": (
        GOOD.replace("{", '{"gradient_clipping": 7.5,', 1).replace(
            '"gradient_clipping": "auto",', ""
        ),
        "7.5",
    ),
}


@pytest.mark.parametrize(
    "mistake",
    [
        "a misspelt key",  # the other refusals: tests/engine/test_ds_config.py
        *(pytest.param(x, marks=pytest.mark.full) for x in MISTAKES if x != "a misspelt key"),
    ],
)
def test_a_mistake_in_the_json_is_refused_in_one_line(
    mistake: str, tmp_path: Path, outcomes: Outcomes
) -> None:
    text, word = MISTAKES[mistake]
    path = tmp_path / "config.json"
    path.write_text(text)
    result = on_one_rank("m7c.py", *TINY, f"--deepspeed_config={path}", folder=tmp_path)
    line = refused(result)
    assert line.startswith("m7c: ")
    assert word in line
    assert list(tmp_path.iterdir()) == [path], "no run folder"
    outcomes.record("json", mistake, codes=[result.returncode])


def test_a_second_run_and_garbage_in_a_heartbeat_do_not_affect_the_first(
    tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    run = start(tmp_path, "--until=4")
    run.wait_for_step(1)
    with (run.dir / "heartbeat_rank1.jsonl").open("ab") as file:
        file.write(b'{"event": "step_end", "step"\n\xff\xfe\x00[[[[[\n{"step": null}\n"torn')
    second = on_one_rank("m7c.py", *SETTINGS, "--resume", folder=tmp_path)
    line = refused(second)
    assert str(run.ranks.pids[0]) in line, "names the owner"
    assert "--run-dir" in line
    run.end()
    assert run.codes == [0, 0], run.output[-3_000:]
    assert losses(run.dir) == {step: golden.losses[step] for step in range(1, 5)}
    assert run.beats(1)[-1]["event"] == "end"
    assert os.listdir(tmp_path) == ["run"]
    outcomes.record("two-runs", "", codes=[second.returncode])
    outcomes.record("heartbeat", "", codes=run.codes, lost=0, exact=True)
