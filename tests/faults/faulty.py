"""recipes/m7c.py with one fault planted from outside: what, where, at which step, on which ranks.

    FAULT='{"do": "kill", "where": "backward", "step": 5, "ranks": [1], "mark": "/tmp/x"}'

It happens once: each rank that suffers it leaves a file beside `mark`, and is healthy when it is
started again. Steps are counted by the batches taken since the start of the process.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[2] / "recipes" / "m7c.py"
HOUR = 3_600.0
SLOW = 0.4  # seconds


class Fault:
    """The planted fault; `met` is called wherever it could happen."""

    def __init__(self, do: str, where: str, step: int, mark: Path, number: int = 1) -> None:
        self.do, self.where, self.step, self.mark = do, where, step, mark
        self.steps = 0  # begun by this process
        self.left = number  # times that the place has to be met

    def met(self, where: str) -> bool:
        """Let it happen if this is the place; True where the caller has to do it."""
        if where != self.where or self.steps < self.step or self.mark.exists():
            return False
        if self.do == "slow":  # at every step
            time.sleep(SLOW)
            return False
        self.left -= 1
        if self.left:
            return False
        self.mark.write_text(str(time.time()))
        if self.do in ("kill", "stop", "term", "int"):
            number = {"kill": "SIGKILL", "stop": "SIGSTOP", "term": "SIGTERM", "int": "SIGINT"}
            os.kill(os.getpid(), getattr(signal, number[self.do]))
        elif self.do == "hang":
            while True:
                time.sleep(1)
        elif self.do == "raise":
            raise RuntimeError(f"planted in {where}")
        elif self.do in ("clock back", "clock on"):
            jump_clock(-HOUR if self.do == "clock back" else HOUR)
        return self.do in ("nan", "inf", "wrong token")


def jump_clock(seconds: float) -> None:
    """What time.time() tells from here on in this process."""
    real = time.time
    time.time = lambda: real() + seconds


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Have `act` called with the arguments of each call of owner.name, before it."""
    usual = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return usual(*args, **kwargs)

    setattr(owner, name, patched)


def plant(fault: Fault) -> None:
    """Hook onto every place that a fault can be told to happen at."""
    import deepspeed
    import torch

    from nsa.checkpoint import Saver
    from nsa.data.loader import BatchLoader
    from nsa.model import LanguageModel

    def next_batch(self: Any) -> None:
        fault.steps += 1
        fault.met("data")

    before(BatchLoader, "next_batch", next_batch)
    before(deepspeed.DeepSpeedEngine, "backward", lambda *_, **__: fault.met("backward"))
    before(deepspeed.DeepSpeedEngine, "step", lambda *_, **__: fault.met("step"))
    before(torch.distributed, "all_reduce", lambda *_, **__: fault.met("collective"))
    before(Saver, "save", lambda *_, **__: fault.met("save"))
    for name in ("fsync", "replace", "rename"):
        before(os, name, lambda *_, **__: fault.met("file"))
    poison(LanguageModel, fault, float("nan" if fault.do == "nan" else "inf"))


def poison(model: Any, fault: Fault, number: float) -> None:
    """Faults of a forward pass, and of the numbers that go into it and come out of it."""
    usual = model.forward

    def forward(self: Any, input_ids: Any, labels: Any = None, cu_seqlens: Any = None) -> Any:
        fault.met("forward" if self.training else "eval")
        if self.training and fault.met("tokens"):
            input_ids = input_ids + 10_000
        out = usual(self, input_ids, labels=labels, cu_seqlens=cu_seqlens)
        if self.training and fault.met("loss"):
            out = out * number
        if self.training and fault.met("gradient"):
            out.register_hook(lambda gradient: gradient * number)
        return out

    model.forward = forward


def main() -> None:
    """Plant what FAULT says on the ranks that it names, and be the recipe."""
    asked = json.loads(os.environ["FAULT"])
    rank = int(os.environ.get("RANK", 0))
    ranks, mark = asked.pop("ranks"), asked.pop("mark")
    if rank in ranks:
        fault = Fault(**asked, mark=Path(f"{mark}.{rank}"))
        if fault.where == "setup":
            fault.met("setup")
        plant(fault)
    sys.argv[0] = str(RECIPE)
    sys.path[0] = str(RECIPE.parent)
    runpy.run_path(str(RECIPE), run_name="__main__")


if __name__ == "__main__":
    main()
