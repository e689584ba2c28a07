"""One rank of `python -m nsa.bench comm`: builds engines and takes steps as it is told.

A line of JSON on stdin is an order, a line of JSON on a pipe its answer; the end of stdin ends it,
so no rank outlives the benchmark. Its backend is gloo or NCCL between two ranks, or torch's `fake`
one: a rank of two whose collectives return at once, so that what is left of a step is computing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import comm as ds_comm

from nsa.engine.build import build_model, initialise
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import resolve_ds_config
from nsa.engine.process_group import leave_out_shared_memory_op
from nsa.model import AttentionConfig, ModelConfig
from nsa.spec import NSASpec

RANKS = 2
SETTLE = 0.15  # seconds until what waits at the throttle has left
NICENESS = -10  # beside other work on the machine; nothing changes on a quiet one
SENT = {  # by each of two ranks in a ring, of the size that DeepSpeed logs
    "all_reduce": 1.0,
    "all_gather": 1.0,  # what is logged is a rank's own part
    "reduce_scatter": 0.5,
    "reduce": 0.5,  # one owns the result, the other sends; each owns half of them
    "barrier": 0.0,
    "broadcast": 0.5,
}


class Rank:
    """The engine under measurement, and what moves it."""

    def __init__(self, device: torch.device, counter: Path | None) -> None:
        self._device = device
        self._counter = counter
        self._engine: Any = None

    def build(self, order: dict[str, Any]) -> dict[str, Any]:
        """Replace the engine by one for this DeepSpeed JSON and accumulation."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            gc.collect()
        config = RunConfig(model=_model(order["model"]))
        config.train.accumulation = order["accumulation"]
        config.validate()
        resolved = resolve_ds_config(order["ds_config"], config, world_size=RANKS)
        model = build_model(config, self._device)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._engine = initialise(model, config, resolved)
        torch.manual_seed(dist.get_rank())
        shape = (order["accumulation"], 1, order["tokens"])
        self._batches = torch.randint(config.model.vocab_size, shape, device=self._device)
        return {"parameters": parameters}

    def steps(self, order: dict[str, Any]) -> dict[str, Any]:
        """Take so many steps: the seconds of each, and the bytes that left over the link."""
        dist.barrier()
        time.sleep(SETTLE)
        before = self._sent()
        seconds = [self._step() for _ in range(order["count"])]
        dist.barrier()
        time.sleep(SETTLE)
        return {"seconds": seconds, "bytes": self._sent() - before}

    def payload(self, order: dict[str, Any]) -> dict[str, Any]:
        """Take one step under DeepSpeed's comms logger: bytes sent, as a ring of two would."""
        logger = ds_comm.comms_logger
        deepspeed.comm.configure(enabled=True, prof_all=True)
        logger.reset_data()
        self._step()
        deepspeed.comm.configure(enabled=False)
        sent, unknown = 0.0, []
        for name, sizes in logger.get_raw_data().items():
            share = next((s for op, s in SENT.items() if name.startswith(op)), None)
            if share is None:
                unknown.append(name)
                continue
            sent += share * sum(size * record[0] for size, record in sizes.items())
        logger.reset_data()
        return {"bytes": sent, "unknown": unknown}

    def collective(self, order: dict[str, Any]) -> dict[str, Any]:
        """The seconds that one collective over so many bf16 elements takes, each time."""
        whole = torch.zeros(order["elements"], dtype=torch.bfloat16, device=self._device)
        part = whole.chunk(RANKS)[dist.get_rank()].clone()
        does = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        }
        seconds = []
        for _ in range(order["count"]):
            dist.barrier()
            start = self._now()
            does[order["name"]]()
            seconds.append(self._now() - start)
        return {"seconds": seconds}

    def _step(self) -> float:
        start = self._now()
        for ids in self._batches:
            loss = self._engine(ids, labels=ids.roll(-1, 1))
            self._engine.backward(loss)
            self._engine.step()
        return self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _sent(self) -> int:
        return int(self._counter.read_text()) if self._counter else 0


def _model(settings: dict[str, Any]) -> ModelConfig:
    attention = AttentionConfig(spec=NSASpec(**settings["spec"]))
    rest = {name: value for name, value in settings.items() if name != "spec"}
    return ModelConfig(**rest, attention=attention)


def join(place: dict[str, Any]) -> torch.device:
    """Join the other rank, or imagine it."""
    leave_out_shared_memory_op()
    rank, backend = place["rank"], place["backend"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    # DeepSpeed calls the older names of two collectives; nothing a user can fix.
    warnings.filterwarnings("ignore", r".*(all_gather_into|reduce_scatter)_tensor", FutureWarning)
    os.environ.update(MASTER_ADDR=place["address"], MASTER_PORT=str(place["port"]))
    if place["interface"]:
        os.environ.update(GLOO_SOCKET_IFNAME=place["interface"])
    with contextlib.suppress(OSError):  # without the right to it, it is measured as it comes
        os.nice(NICENESS)
        Path("/proc/self/autogroup").write_text(str(NICENESS))  # a session counts as one of many
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        # Either is rank 0: what it would hear from that one is then what it says itself.
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    deepspeed.init_distributed(backend, verbose=False)
    return device


def serve(rank: Rank, orders: TextIO, answers: TextIO) -> None:
    """Carry out orders until there are no more."""
    does = {
        "build": rank.build,
        "steps": rank.steps,
        "payload": rank.payload,
        "collective": rank.collective,
    }
    for line in orders:
        order = json.loads(line)
        answers.write(json.dumps(does[order["do"]](order)) + "\n")
        answers.flush()


def main() -> None:
    """Started by the benchmark with its place as JSON."""
    place = json.loads(sys.argv[1])
    answers = os.fdopen(place["answers"], "w")
    torch.set_num_threads(place["threads"])
    device = join(place)
    interface = place["interface"]
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes") if interface else None
    serve(Rank(device, counter), sys.stdin, answers)
    os._exit(0)


if __name__ == "__main__":
    main()
