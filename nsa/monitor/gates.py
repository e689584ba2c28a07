"""How open the gates of the three branches are, measured only when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

BRANCHES = ("cmp", "sel", "win")


class GateRecorder:
    """Listens to gate projections: linears whose output [..., heads * 3] is, before the sigmoid,
    [..., heads, 3] in the order cmp, sel, win.

    Between logged steps a forward pass pays one attribute check and nothing is kept. While armed,
    sums stay on the device, so nothing waits for it, and no collective is ever used.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._armed = False
        self._sums: dict[str, torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._handles = [
            module.register_forward_hook(self._hook(name)) for name, module in modules.items()
        ]

    def arm(self) -> None:
        """Listen from the next forward pass on, having forgotten what was heard before."""
        self._sums.clear()
        self._calls.clear()
        self._armed = True

    def disarm(self) -> None:
        """Stop listening; what was heard stays for `read`."""
        self._armed = False

    @contextmanager
    def armed(self) -> Iterator[GateRecorder]:
        """Listen within the block."""
        self.arm()
        try:
            yield self
        finally:
            self.disarm()

    def read(self) -> dict[str, float]:
        """The mean gate of each branch since `arm`, over layers, tokens and heads; the one sync.

        Empty where nothing was heard. Stops listening.
        """
        self.disarm()
        if not self._sums:
            return {}
        means = torch.stack([self._sums[name] / self._calls[name] for name in self._sums]).mean(0)
        self._sums.clear()
        self._calls.clear()
        return dict(zip(BRANCHES, means.tolist(), strict=True))

    def close(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
        def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            if self._armed:
                self._add(name, output.detach())

        return hook

    def _add(self, name: str, logits: torch.Tensor) -> None:
        """Recomputation adds the same mean once more, which leaves the layer's mean as it is."""
        # Selective checkpointing counts operations to find what it saved: it must not see ours, or
        # a recorder armed between forward and recomputation would hand the model wrong tensors.
        with _disable_current_modes(), torch.no_grad():
            mean = logits.float().reshape(-1, len(BRANCHES)).sigmoid().mean(0)
            self._sums[name] = self._sums[name] + mean if name in self._sums else mean
        self._calls[name] = self._calls.get(name, 0) + 1
