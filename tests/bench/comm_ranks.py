"""One rank of `python -m tests.bench comm`: it builds engines and takes steps on request.

The backend is gloo between two ranks, or torch's `fake` one, whose collectives return at once: what
remains of a step is compute. `tests.bench profile` joins with NCCL, as a single rank.
"""

import gc
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import comm as ds_comm

from nsa.engine import disable_shared_memory_op
from nsa.engine.build import build_model, initialise
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import resolve_ds_config
from nsa.model import AttentionConfig, ModelConfig
from nsa.spec import NSASpec
from tests.netns import INTERFACE, RANKS

SETTLE_SECONDS = 0.15  # until packets queued at the throttle have left
SENT = {  # bytes sent by each of two ranks in a ring, relative to the size that DeepSpeed logs
    "all_reduce": 1.0,
    "all_gather": 1.0,  # logged is a rank's own part
    "reduce_scatter": 0.5,
}


class Rank:
    """The engine under measurement; a method per action."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._engine: Any = None

    def build(
        self, model: dict[str, Any], tokens: int, accumulation: int, ds_config: dict[str, Any]
    ) -> int:
        """Replace the engine; return the number of its parameters."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            gc.collect()
        attention = AttentionConfig(spec=NSASpec(**model.pop("spec")))
        config = RunConfig(model=ModelConfig(**model, attention=attention))
        config.train.accumulation = accumulation
        config.validate()
        resolved = resolve_ds_config(ds_config, config, world_size=RANKS)
        built = build_model(config, self._device)
        parameters = sum(parameter.numel() for parameter in built.parameters())
        self._engine = initialise(built, config, resolved)
        torch.manual_seed(dist.get_rank())
        shape = (accumulation, 1, tokens)
        self._batches = torch.randint(config.model.vocab_size, shape, device=self._device)
        return parameters

    def steps(self, count: int) -> tuple[list[float], int]:
        """Take steps; return the seconds of each, and the bytes sent over the link."""
        dist.barrier()
        time.sleep(SETTLE_SECONDS)
        before = sent_bytes()
        seconds = [self._step() for _ in range(count)]
        dist.barrier()
        time.sleep(SETTLE_SECONDS)
        return seconds, sent_bytes() - before

    def payload(self) -> float:
        """Return the bytes that a rank sends in a step, without those of the transport."""
        return payload_bytes(self._step)

    def collective(self, name: str, elements: int, count: int) -> list[float]:
        """Return the seconds of each repetition of a collective over bf16 elements."""
        full = torch.zeros(elements, dtype=torch.bfloat16, device=self._device)
        part = full.chunk(RANKS)[dist.get_rank()].clone()
        seconds = []
        for _ in range(count):
            dist.barrier()
            start = self._now()
            if name == "all_reduce":
                dist.all_reduce(full)
            else:
                dist.all_gather_into_tensor(full, part)
            seconds.append(self._now() - start)
        return seconds

    def _step(self) -> float:
        start = self._now()
        for ids in self._batches:
            loss = self._engine(ids, labels=ids.roll(-1, 1))
            self._engine.backward(loss)
            self._engine.step()
        return self._now() - start

    def _now(self) -> float:
        torch.get_device_module(self._device).synchronize()
        return time.perf_counter()


def payload_bytes(step: Callable[[], object]) -> float:
    """Return the bytes that a ring of two sends in a step, by DeepSpeed's comms logger."""
    logger = ds_comm.comms_logger
    deepspeed.comm.configure(enabled=True, prof_all=True)
    logger.reset_data()
    step()
    deepspeed.comm.configure(enabled=False)
    sent = 0.0
    for name, sizes in logger.get_raw_data().items():
        factor = next(factor for op, factor in SENT.items() if name.startswith(op))
        sent += factor * sum(size * record[0] for size, record in sizes.items())
    logger.reset_data()
    return sent


def sent_bytes() -> int:
    """Return the bytes sent over the link; 0 without one. /sys would show the host's interfaces."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


def join(rank: int, ranks: int, backend: str, address: tuple[str, int]) -> torch.device:
    """Join the process group; return this rank's device."""
    disable_shared_memory_op()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    host, port = address
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    if host != "127.0.0.1":
        os.environ.update(GLOO_SOCKET_IFNAME=INTERFACE)
    # DeepSpeed calls two collectives by their deprecated names, which a user cannot fix.
    warnings.filterwarnings("ignore", r".*(all_gather_into|reduce_scatter)_tensor", FutureWarning)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        # Both are rank 0, so what they would receive equals what they send.
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    deepspeed.init_distributed(backend, verbose=False)
    return device
