"""W&B, from DeepSpeed's block, with the real client, offline; a missing client is refused."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.runs import TINY, Finished, losses, on_one_rank, refused, succeed
from tests.ranks import ROOT


def write_config(folder: Path) -> Path:
    config = json.loads((ROOT / "ds_configs/zero1_pcie.json").read_text())
    file = folder / "mine.json"
    file.write_text(json.dumps(config | {"wandb": {"enabled": True, "project": "m7c"}}))
    return file


def start(folder: Path, **environment: str) -> Finished:
    """Run three steps that are sent to W&B."""
    flags = ["--steps=3", "--run-dir=run", f"--deepspeed_config={write_config(folder)}"]
    flags += ["--set=data.source=synthetic", "--set=monitor.log_every=1"]
    return on_one_rank("m7c.py", *TINY, *flags, folder=folder, environment=environment)


def wandb_records(run: Path) -> Iterator[Any]:
    """Yield the records of an offline run's file: LevelDB's log format after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def test_wandb_has_the_name_the_settings_the_steps_and_the_end_of_a_run(tmp_path: Path) -> None:
    succeed(start(tmp_path, WANDB_MODE="offline"))
    records = list(wandb_records(tmp_path / "run"))
    (started,) = [record.run for record in records if record.HasField("run")]
    assert (started.display_name, started.project) == ("run", "m7c")
    config = {item.key: item.value_json for one in records for item in one.config.update}
    assert json.loads(config["train"])["steps"] == 3
    sent = {
        one.history.step.num: float(item.value_json)
        for one in records
        for item in one.history.item
        if "train/loss" in (item.key, *item.nested_key)
    }
    assert sent == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def test_wandb_without_an_api_key_is_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    result = start(tmp_path, WANDB_API_KEY="", HOME=str(tmp_path))
    assert refused(result).startswith("m7c: wandb: No API key configured")
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_one_line_that_names_it(tmp_path: Path) -> None:
    (program := tmp_path / "without.py").write_text(
        "import runpy, sys\nsys.modules['wandb'] = None  # Python's mark: not importable\n"
        f"runpy.run_path({str(ROOT / 'recipes/m7c.py')!r}, run_name='__main__')\n"
    )
    flag = f"--deepspeed_config={write_config(tmp_path)}"
    result = on_one_rank(str(program), *TINY, flag, folder=tmp_path)
    assert refused(result) == (
        "m7c: wandb: import of wandb halted; None in sys.modules; install it, or remove its block "
        "from the DeepSpeed config"
    )
