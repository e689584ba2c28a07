"""One rank of a real DeepSpeed engine whose monitor an observer writes to."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch

from nsa.engine import disable_shared_memory_op
from nsa.monitor.observer import BackgroundWriter, Observers
from nsa.monitor.outputs import TrackerObserver
from tests.monitor.records import (
    drain,
    files_no_longer_than,
    make_layers,
    make_record,
)

SETTINGS = {
    "model": {"layers": 2, "attention": {"kind": "nsa"}, "value_dim": None},
    "train": {"learning_rate": 1e-3, "shared": False},
}
TEXTS = {"config.yaml": "model:\n  layers: 2\n", "ds_config.json": "{}\n"}


def main(run_dir: Path, disk: str) -> None:
    disable_shared_memory_op()
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(4, 1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "torch_adam": True}},
            "tensorboard": {"enabled": True, "output_path": str(run_dir), "job_name": "tb"},
        },
    )
    writer = BackgroundWriter("TensorBoard", capacity=4096)
    tracker = TrackerObserver(engine.monitor, SETTINGS, TEXTS)
    observers = Observers([(tracker, writer)] if torch.distributed.get_rank() == 0 else [])
    monitor, engine.monitor = engine.monitor, SimpleNamespace(enabled=False)
    observers.on_start(run_dir, 0)

    def step(number: int) -> None:
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        evaluated = {"val_loss": 2.5, "bits_per_byte": 1.25} if number == 2 else {}
        warm = {"mfu": 0.125, "layers": make_layers(1)} if number > 1 else {"tokens_per_s": None}
        observers.on_step(make_record(number, skipped_steps=number - 1, **evaluated, **warm))

    for number in range(1, 4):
        step(number)
    if disk == "full":
        # Large enough that the limit hits the event file, not this output.
        filler = [(f"filler/{index}", 0.0, 0) for index in range(2000)]
        writer.submit(lambda: monitor.write_events(filler))
        drain(writer)
        (event_file,) = (run_dir / "tb").iterdir()
        with files_no_longer_than(event_file.stat().st_size + 10):
            for number in range(4, 7):
                step(number)
            drain(writer)
    observers.on_end("finished")
    writer.close()
    print("steps", engine.global_steps, "failed", writer.failed > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
