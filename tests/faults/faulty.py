"""recipes/m7c.py with frequent heartbeats and a planted fault: action, place, step, ranks.

    FAULT='{"action": "kill", "where": "backward", "step": 5, "ranks": [1], "mark": "/tmp/x"}'

The fault happens once: the rank writes a file `mark`.<rank> first and is healthy after a restart.
Steps are counted since the process started.
"""

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
SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP", "term": "SIGTERM", "int": "SIGINT"}
CLOCK_JUMPS = {"clock back": -3_600.0, "clock forward": 3_600.0}
SLOW = 0.4  # seconds


class Fault:
    """The planted fault; `reach` is called wherever it could happen."""

    def __init__(self, action: str, where: str, step: int, mark: Path, call: int = 1) -> None:
        self.action, self.where, self.step, self.mark = action, where, step, mark
        self.steps = 0  # started by this process
        self.calls_left = call  # until it happens

    def reach(self, where: str) -> bool:
        """Act if the fault is due here; return True if the caller has to act."""
        if where != self.where or self.steps < self.step or self.mark.exists():
            return False
        if self.action == "slow":  # at every step
            time.sleep(SLOW)
            return False
        self.calls_left -= 1
        if self.calls_left:
            return False
        self.mark.write_text(str(time.time()))
        if self.action in SIGNALS:
            os.kill(os.getpid(), getattr(signal, SIGNALS[self.action]))
        elif self.action == "hang":
            while True:
                time.sleep(1)
        elif self.action == "raise":
            raise ValueError(f"planted in {where}")
        elif self.action in CLOCK_JUMPS:
            clock, jump = time.time, CLOCK_JUMPS[self.action]
            time.time = lambda: clock() + jump
        return self.action in ("nan", "inf", "wrong token")


def call_before(owner: Any, name: str, hook: Callable[..., object]) -> None:
    """Patch owner.name to call `hook` first, with the same arguments."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def plant(fault: Fault) -> None:
    """Patch every place where a fault can happen."""
    import deepspeed
    import torch

    from nsa.checkpoint.saver import Saver
    from nsa.data.batches import Samples
    from nsa.model import LanguageModel

    def start_step(*_: Any, **__: Any) -> None:
        fault.steps += 1
        fault.reach("data")

    call_before(Samples, "step", start_step)
    for owner, name, where in (
        (deepspeed.DeepSpeedEngine, "backward", "backward"),
        (deepspeed.DeepSpeedEngine, "step", "step"),
        (torch.distributed, "all_reduce", "collective"),
        (Saver, "save", "save"),
        (os, "fsync", "file"),
        (os, "replace", "file"),
        (os, "rename", "file"),
    ):
        call_before(owner, name, lambda *_, where=where, **__: fault.reach(where))
    plant_in_forward(LanguageModel, fault, float("nan" if fault.action == "nan" else "inf"))


def plant_in_forward(model: Any, fault: Fault, bad_value: float) -> None:
    """Faults of the forward pass, its inputs and its outputs."""
    original = model.forward

    def forward(self: Any, input_ids: Any, labels: Any = None, cu_seqlens: Any = None) -> Any:
        fault.reach("forward" if self.training else "eval")
        if self.training and fault.reach("tokens"):
            input_ids = input_ids + 10_000
        out = original(self, input_ids, labels=labels, cu_seqlens=cu_seqlens)
        if self.training and fault.reach("loss"):
            out = out * bad_value
        if self.training and fault.reach("gradient"):
            out.register_hook(lambda gradient: gradient * bad_value)
        return out

    model.forward = forward


def main() -> None:
    """Plant the fault, if any, on its ranks, then run the recipe."""
    if "FAULT_GRACE" in os.environ:
        from nsa.engine import process_group, shutdown

        grace = float(os.environ["FAULT_GRACE"])
        shutdown.PEER_LOSS_GRACE_SECONDS = process_group.ROOT_CAUSE_GRACE_SECONDS = grace
    from nsa.engine import telemetry

    telemetry.HEARTBEAT_SECONDS = 0.1
    if "FAULT" in os.environ:
        settings = json.loads(os.environ["FAULT"])
        rank = int(os.environ.get("RANK", 0))
        ranks, mark = settings.pop("ranks"), settings.pop("mark")
        if rank in ranks:
            plant(Fault(**settings, mark=Path(f"{mark}.{rank}")))
    sys.argv[0] = str(RECIPE)
    sys.path[0] = str(RECIPE.parent)
    runpy.run_path(str(RECIPE), run_name="__main__")


if __name__ == "__main__":
    main()
