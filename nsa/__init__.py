"""Native Sparse Attention: a 125M language model and its training with DeepSpeed.

`nsa.NSAttention` is a drop-in attention layer, `nsa.ops` its functions; `import nsa.model.hf`
registers the model with transformers' Auto classes. `import nsa` imports nothing heavy: names load
at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa import ops
    from nsa.model import NSAttention
    from nsa.spec import NSASpec

__all__ = ["NSASpec", "NSAttention", "ops"]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("nsa.ops")
    if name == "__version__":
        return import_module("nsa.system").package_version("nsa-m7c") or "unknown: not installed"
    if name in __all__:
        return getattr(import_module("nsa.spec" if name == "NSASpec" else "nsa.model"), name)
    raise AttributeError(f"module 'nsa' has no attribute {name!r}")
