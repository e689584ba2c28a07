"""Worker of test_plan_memory.py on two ranks: what DeepSpeed's engine allocates in one step.

Its argument is config:checkpointing:attention. It prints a line of JSON: bytes in use between
steps, peak, collectives, and the bytes that a rank sends in a step.
"""

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from nsa.engine.build import build_model, initialise
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.spec import NSASpec
from tests.bench.comm_ranks import payload_bytes

SPANS = ("step", "step again", "last step")
DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"

BUCKET = 2**17  # elements; small relative to the model, as for M7C


def toy(checkpointing: str = "none", kind: str = "dense") -> RunConfig:
    """A model in which no part dominates memory.

    Dense by default: on a CPU, sparse attention's tiles would dominate."""
    config = RunConfig()
    model, attention = config.model, config.model.attention
    model.vocab_size, model.layers, model.width, model.mlp_width = 768, 3, 192, 544
    model.heads, model.kv_heads, model.head_dim = 6, 2, 32
    attention.spec = NSASpec(16, 8, 16, 4, 1, 1, 64)
    attention.kind, attention.backend = kind, "blockwise"
    model.activation_checkpointing = checkpointing
    config.data.seq_len = 160  # so that activations dominate
    config.train.micro_batch, config.train.accumulation = 1, 2
    return config


class Allocations:
    """Bytes allocated since the start of each span, and its collectives, by PyTorch's profiler.

    Frees by gloo's threads are not recorded, so usage is relative to a span's start; what is in
    use before is counted from live tensors (`live_bytes`).
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self.held: dict[str, int] = {}  # at the end of the span
        self.collectives: dict[str, int] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @contextmanager
    def recording(self) -> Iterator["Allocations"]:
        with self._profile:
            yield self
        events = self._profile.profiler.kineto_results.events()
        spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name()[:5] == "span "}
        started = [e.start_ns() for e in events if e.name().startswith("c10d::")]
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        for name, (start, end) in spans.items():
            used = peak = 0
            for when, change in changes:
                if start <= when <= end:
                    used += change
                    peak = max(peak, used)
            self.peak[name[5:]], self.held[name[5:]] = peak, used
            self.collectives[name[5:]] = sum(start <= when <= end for when in started)

    @staticmethod
    def span(name: str) -> torch.profiler.record_function:
        return record_function(f"span {name}")


def live_bytes() -> int:
    """Return the bytes of all tensors known to Python, each storage once."""
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def step(config: RunConfig, engine: torch.nn.Module) -> None:
    shape = config.train.micro_batch, config.data.seq_len
    for _ in range(config.train.accumulation):
        ids = torch.randint(config.model.vocab_size, shape)
        engine.backward(engine(ids, labels=ids))
        engine.step()


def measured(name: str, checkpointing: str, kind: str) -> dict[str, float]:
    config = toy(checkpointing, kind)
    raw = load_ds_config(DS_CONFIGS / f"{name}.json")
    resolved = resolve_ds_config(raw, config, world_size=2)
    zero = resolved["zero_optimization"]
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
        if key in zero:
            zero[key] = BUCKET
    gc.collect()
    before = live_bytes()
    recorded = Allocations()
    with nullcontext() if dist.get_rank() else recorded.recording():
        engine = initialise(build_model(config, torch.device("cpu")), config, resolved)
        step(config, engine)
        gc.collect()
        between = live_bytes() - before
        for span in SPANS:
            with recorded.span(span):
                step(config, engine)
        sent = payload_bytes(partial(step, config, engine))
        engine.destroy()
        del engine
        gc.collect()
    if dist.get_rank():  # the test reads rank 0's
        return {}
    return {
        "between": between,
        # Frees by gloo's threads are not seen: peaks come out high, more so on a busy machine.
        "peak": between + min(recorded.peak[span] for span in SPANS),
        "collectives": recorded.collectives[SPANS[0]],
        "sent": sent,
    }


if __name__ == "__main__":
    start_ranks(Ranks.from_environment())
    print(json.dumps(measured(*sys.argv[1].split(":"))))
    stop_ranks()
