"""Native Sparse Attention: a 125M language model and its training with DeepSpeed.

`nsa.NSAttention` is a drop-in attention layer, `nsa.ops` its functions. `import nsa` registers the
model with transformers' Auto classes, whether transformers is imported before or after it. It
imports nothing heavy: names load at their first use, and an import hook registers the model with
an Auto class when transformers loads that class. The same hook limits how long DeepSpeed waits for
a build (nsa/engine/shared_memory_op.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
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
        version = import_module("nsa.system").package_version("nsa-m7c")
        return version or "unknown: not installed"
    if name in __all__:
        return getattr(import_module("nsa.spec" if name == "NSASpec" else "nsa.model"), name)
    raise AttributeError(f"module 'nsa' has no attribute {name!r}")


def _register_config(auto: ModuleType) -> None:
    from nsa.model.hf_config import NSAConfig

    auto.AutoConfig.register(NSAConfig.model_type, NSAConfig, exist_ok=True)


def _register_model(_: ModuleType) -> None:
    heads = sys.modules.get("transformers.modeling_layers")
    if heads is not None and not hasattr(heads, "GenericForQuestionAnswering"):
        return  # it imports the auto classes while it loads; called again after it
    if "transformers.models.auto.modeling_auto" in sys.modules:
        import_module("nsa.model.hf")  # registers itself on import, which may be in progress


def _limit_build_wait(comm: ModuleType) -> None:
    from nsa.engine.shared_memory_op import limit_build_wait

    limit_build_wait(comm)


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_model,
    "transformers.modeling_layers": _register_model,
    "deepspeed.comm.torch": _limit_build_wait,
}


class _AfterImport:
    """Import hook: after a module is loaded, pass it to its function in _AFTER_IMPORT."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _AFTER_IMPORT:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_run(module: ModuleType) -> None:
            load(module)
            _AFTER_IMPORT[name](module)

        spec.loader.exec_module = load_and_run  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterImport())
for _name, _run in _AFTER_IMPORT.items():
    if _name in sys.modules:
        _run(sys.modules[_name])
