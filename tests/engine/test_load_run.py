"""A trained run is opened for use: as it was trained, by itself, and left as it is."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nsa.checkpoint.weights import read_weights
from nsa.cli import main
from nsa.data.config import DataConfig
from nsa.data.factory import open_source
from nsa.data.prepare import prepare
from nsa.data.shards import read_index, write_index
from nsa.data.source import DataError
from nsa.data.tokenizer import ByteTokenizer, build_tokenizer, train_tokenizer
from nsa.data.validation import open_validation
from nsa.engine.config import RunConfig
from nsa.engine.load_run import config_of, load_run, open_tokenizer
from nsa.engine.resolve import resolve_config, to_yaml
from nsa.export.tokenizer import write_tokenizer
from nsa.monitor.metrics_csv import read_metrics
from tests.data.texts import texts, write_lines
from tests.engine.runs import TINY, alone, succeed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on prepared text, saved at the third and the last."""
    folder = tmp_path_factory.mktemp("opened")
    prepared = write_prepared(folder, 400)
    flags = ("--steps=4", "--run-dir=run", f"--set=data.source={prepared}")
    succeed(alone("m7c.py", *TINY, *flags, folder=folder))
    return folder / "run"


def write_prepared(folder: Path, documents: int) -> Path:
    """Text in tokens of its own; `data.tokenizer` of a run on it stays what it was: byte."""
    source = write_lines(folder / "lines.jsonl", texts(documents, 200))
    config = DataConfig(source=source, held_out=0.2)
    config.tokenizer = train_tokenizer(open_source(config, source), 300, folder / "bpe").name
    prepare(config, folder / "prepared", workers=1, progress=False)
    return folder / "prepared"


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_it_judges_text_as_the_trainer_did(run: Path) -> None:
    opened = load_run(run)
    config = opened.config
    text = open_validation(
        config.data, sequences=config.train.eval_samples, micro_batch=8, world_size=1
    )
    (batch,) = text.batches(0)
    with torch.no_grad():
        loss = opened.model(batch.input_ids, labels=batch.labels).item()
    assert loss == pytest.approx(read_metrics(run / "metrics.csv")[-1]["val_loss"], rel=1e-5)
    assert (opened.step, opened.place, opened.model.training) == (4, run, False)
    assert opened.weights == run / "checkpoints" / "step00000004"
    assert opened.model.embed.weight.dtype == torch.bfloat16


def test_neither_deepspeed_nor_ranks_are_needed_and_the_folder_stays_as_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state_of(run)
    monkeypatch.chdir(run / "checkpoints")
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # an import of it raises
    opened = load_run("step00000004")
    assert opened.place == run
    with torch.no_grad():
        opened.model(torch.arange(20)[None])
    assert not torch.distributed.is_initialized()
    assert state_of(run) == before


def test_in_float32_the_optimizers_weights_are_opened(run: Path) -> None:
    exact, trained = load_run(run, dtype=torch.float32), load_run(run)
    wanted = read_weights(trained.weights, torch.float32)
    for name, weight in exact.model.state_dict().items():
        assert torch.equal(weight, wanted[name])
    high, low = exact.model.embed.weight, trained.model.embed.weight
    assert not torch.equal(high, low.float())
    assert torch.equal(high.bfloat16(), low)


def test_a_checkpoint_is_opened_by_its_name_and_a_broken_one_is_passed_over(
    run: Path, tmp_path: Path
) -> None:
    named = load_run(run / "checkpoints" / "step00000003")
    assert (named.step, named.place) == (3, run)
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    file = copied / "checkpoints/step00000004/mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="passed over: step00000004: mp_rank_00_model_states.pt"):
        other = load_run(copied)
    assert other.step == 3
    assert torch.equal(other.model.embed.weight, named.model.embed.weight)


def test_settings_are_found_beside_the_weights_or_in_the_runs_folder(
    run: Path, tmp_path: Path
) -> None:
    """DeepSpeed's converter leaves them out."""
    converted = tmp_path / "checkpoints" / "step00000004.universal"
    converted.mkdir(parents=True)
    shutil.copyfile(run / "config.yaml", tmp_path / "config.yaml")
    assert config_of(converted) == resolve_config(RunConfig(), run / "config.yaml")
    (converted / "model.safetensors").touch()  # somebody else's, who may have another model
    with pytest.raises(ValueError, match=r"has no config.yaml$"):
        config_of(converted)
    (converted / "config.json").touch()
    with pytest.raises(ValueError, match=r"has no config.yaml; .* nsa import .*universal --to"):
        config_of(converted)


def test_prepared_text_and_files_beside_the_weights_name_the_tokenizer(tmp_path: Path) -> None:
    """`data.tokenizer` counts for neither."""
    prepared = write_prepared(tmp_path, 40)
    config, bpe = DataConfig(source=str(prepared)), tmp_path / "bpe"
    trained = build_tokenizer(DataConfig(tokenizer=f"hf:{bpe}"))
    plain = DataConfig(source=str(tmp_path / "lines.jsonl"))

    assert open_tokenizer(plain, tmp_path).name == "byte"
    of_text = open_tokenizer(config, tmp_path)
    beside = open_tokenizer(DataConfig(tokenizer="hf:not/here"), bpe)
    assert of_text.fingerprint == beside.fingerprint == trained.fingerprint

    index = read_index(prepared)
    other = replace(index.stamp, tokenizer_fingerprint="of what it was")
    write_index(prepared, replace(index, stamp=other))
    with pytest.raises(DataError, match=r"made with a tokenizer .* no longer the same"):
        open_tokenizer(config, tmp_path)

    prepared.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"prepared' is not there, and which tokenizer made its"):
        open_tokenizer(config, tmp_path)
    assert open_tokenizer(config, bpe).fingerprint == trained.fingerprint
    write_tokenizer(ByteTokenizer(), tmp_path / "bytes", 96)
    assert open_tokenizer(config, tmp_path / "bytes").fingerprint == ByteTokenizer.fingerprint


def test_a_run_and_its_export_keep_the_tokenizer_of_text_that_is_out_of_sight(
    run: Path, tmp_path: Path
) -> None:
    prepared = run.parent / "prepared"
    trained = open_tokenizer(DataConfig(source=str(prepared)), tmp_path)
    prepared.rename(run.parent / "elsewhere")
    try:
        assert main(["export", str(run), "--to", str(tmp_path / "exported")]) == 0
        for place in (run, tmp_path / "exported"):
            opened = load_run(place)
            assert opened.tokenizer is not None
            assert opened.tokenizer.fingerprint == trained.fingerprint
            assert opened.config.data.tokenizer == trained.name
    finally:
        (run.parent / "elsewhere").rename(prepared)


def test_a_run_is_opened_without_its_tokenizer_where_that_is_gone(
    run: Path, tmp_path: Path
) -> None:
    opened = load_run(run)
    save_file(read_weights(opened.weights), tmp_path / "model.safetensors")
    opened.config.data.source, opened.config.data.tokenizer = "embedded", "hf:./gone"
    (tmp_path / "config.yaml").write_text(to_yaml(opened.config))
    with pytest.warns(UserWarning, match="no tokenizer: data.tokenizer = 'hf:./gone': there is no"):
        opened = load_run(tmp_path)
    assert (opened.tokenizer, opened.step, opened.place) == (None, None, tmp_path)
