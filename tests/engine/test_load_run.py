"""load_run: same loss as in training, without DeepSpeed, and the folder stays untouched."""

import json
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
from nsa.data.shards import Index, write_index
from nsa.data.source import DataError
from nsa.data.tokenizer import build_tokenizer
from nsa.data.writer import prepare
from nsa.engine.config import RunConfig, resolve_config, to_yaml
from nsa.engine.load_run import dataset_vocabulary, load_run, read_config, run_tokenizer
from tests.data.test_shards import STAMP
from tests.data.texts import texts, train_tokenizer, write_lines
from tests.engine.runs import TINY, on_one_rank, read_metrics, succeed, validation_loss


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on a dataset prepared with a trained tokenizer, with checkpoints at steps 3 and 4.

    Its `data.tokenizer` stays "byte".
    """
    folder = tmp_path_factory.mktemp("load_run")
    source = write_lines(folder / "lines.jsonl", texts(400, 200))
    config = DataConfig(source=source, held_out=0.2)
    config.tokenizer = train_tokenizer(texts(400, 200), 300, folder / "bpe").name
    prepare(config, folder / "prepared")
    flags = ("--steps=4", "--run-dir=run", f"--set=data.source={folder / 'prepared'}")
    succeed(on_one_rank("m7c.py", *TINY, *flags, folder=folder))
    return folder / "run"


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_loaded_model_has_the_validation_loss_that_training_logged(run: Path) -> None:
    loaded = load_run(run)
    logged = read_metrics(run)[-1]["val_loss"]
    assert validation_loss(loaded, run) == pytest.approx(logged, rel=1e-5)
    assert (loaded.step, loaded.folder, loaded.model.training) == (4, run, False)
    assert loaded.weights_folder == run / "checkpoints" / "step00000004"
    assert loaded.model.embed.weight.dtype == torch.bfloat16


def test_loading_needs_no_deepspeed_and_no_ranks_and_writes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(run)
    monkeypatch.chdir(run / "checkpoints")
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # importing it raises
    loaded = load_run("step00000004")
    assert loaded.folder == run
    with torch.no_grad():
        loaded.model(torch.arange(20)[None])
    assert not torch.distributed.is_initialized()
    assert snapshot(run) == before


def test_a_named_checkpoint_is_loaded_in_a_dtype_of_its_own(run: Path) -> None:
    named = load_run(run / "checkpoints" / "step00000003", dtype=torch.float32)
    assert (named.step, named.folder) == (3, run)
    weights = read_weights(named.weights_folder, torch.float32)
    for name, weight in named.model.state_dict().items():
        assert torch.equal(weight, weights[name])


def test_config_comes_from_beside_the_weights_or_the_run(run: Path, tmp_path: Path) -> None:
    """DeepSpeed's universal converter does not copy config.yaml."""
    converted = tmp_path / "checkpoints" / "step00000004.universal"
    converted.mkdir(parents=True)
    shutil.copyfile(run / "config.yaml", tmp_path / "config.yaml")
    assert read_config(converted) == resolve_config(RunConfig(), run / "config.yaml")
    (converted / "model.safetensors").touch()  # foreign weights, maybe of another model
    with pytest.raises(ValueError, match=r"has no config.yaml$"):
        read_config(converted)
    (converted / "config.json").touch()
    with pytest.raises(ValueError, match=r"has no config.yaml; .* nsa import .*universal --to"):
        read_config(converted)


@pytest.mark.parametrize(
    ("sizes", "vocabulary"), [((), None), ((448,), 448), ((100, 400, 300), 448)]
)
def test_the_largest_prepared_source_determines_the_vocabulary(
    sizes: tuple[int, ...], vocabulary: int | None, tmp_path: Path
) -> None:
    mixture = {"embedded": 1.0}
    for size in sizes:
        (folder := tmp_path / str(size)).mkdir()
        write_index(folder, Index(replace(STAMP, vocab_size=size, eos_id=size - 1), {}, []))
        mixture[str(folder)] = 1.0
    assert dataset_vocabulary(DataConfig(source=mixture)) == vocabulary


def test_the_tokenizer_is_recorded_or_lies_beside_the_weights(run: Path, tmp_path: Path) -> None:
    """A checkpoint's also if `data.tokenizer` is "byte", the default; an import may have set it."""
    bpe, checkpoint = run.parent / "bpe", run / "checkpoints/step00000004"
    trained = build_tokenizer(DataConfig(tokenizer=f"hf:{bpe}"))
    assert run_tokenizer(DataConfig(), tmp_path).name == "byte"
    for folder, data in ((checkpoint, DataConfig()), (bpe, DataConfig(tokenizer="hf:not/here"))):
        assert run_tokenizer(data, folder).fingerprint == trained.fingerprint
    assert run_tokenizer(DataConfig(), bpe).name == "byte"


def test_a_tokenizer_that_has_changed_since_is_refused(run: Path, tmp_path: Path) -> None:
    saved = json.loads((run / "checkpoints/step00000004/state.json").read_text())
    saved["tokenizer"]["fingerprint"] = "changed"
    (tmp_path / "state.json").write_text(json.dumps(saved))
    with pytest.raises(DataError, match=r"was tokenized with .*, which has changed since"):
        run_tokenizer(DataConfig(), tmp_path)
    saved["tokenizer"]["name"] = "gpt2"  # of a forged checkpoint: looked up nowhere
    (tmp_path / "state.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"^data\.tokenizer = 'gpt2': .*hf:gpt2"):
        run_tokenizer(DataConfig(), tmp_path)


def test_a_run_and_its_export_keep_a_lost_datasets_tokenizer(run: Path, tmp_path: Path) -> None:
    prepared = run.parent / "prepared"
    trained = build_tokenizer(DataConfig(tokenizer=f"hf:{run.parent / 'bpe'}"))
    prepared.rename(run.parent / "elsewhere")
    try:
        assert main(["export", str(run), "--to", str(tmp_path / "exported")]) == 0
        for place in (run, tmp_path / "exported"):
            loaded = load_run(place)
            assert loaded.tokenizer is not None
            assert loaded.tokenizer.fingerprint == trained.fingerprint
            assert loaded.config.data.tokenizer == trained.name
    finally:
        (run.parent / "elsewhere").rename(prepared)


def test_a_run_loads_without_its_tokenizer_after_a_warning(run: Path, tmp_path: Path) -> None:
    loaded = load_run(run)
    save_file(read_weights(loaded.weights_folder), tmp_path / "model.safetensors")
    loaded.config.data.source, loaded.config.data.tokenizer = "embedded", "hf:./gone"
    (tmp_path / "config.yaml").write_text(to_yaml(loaded.config))
    with pytest.warns(UserWarning, match="no tokenizer: data.tokenizer = 'hf:./gone': no such"):
        loaded = load_run(tmp_path)
    assert (loaded.tokenizer, loaded.step, loaded.folder) == (None, None, tmp_path)
