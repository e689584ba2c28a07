"""Native Sparse Attention, a 125M language model made of it, and its training with DeepSpeed.

After `import nsa` Hugging Face's Auto classes know the model, whichever of nsa and transformers is
imported first. That costs nothing where transformers is not used: it is done when transformers
loads the module of AutoConfig, and at once where that has happened.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_AUTO_CONFIG = "transformers.models.auto.configuration_auto"


class _WhenLoaded:
    """Finds one module as Python does, and registers the model when it has been loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _AUTO_CONFIG:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                sys.meta_path.remove(self)
                _register(module)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def _register(auto: ModuleType) -> None:
    from nsa.model.hf_config import NSAConfig

    auto.AutoConfig.register(NSAConfig.model_type, NSAConfig, exist_ok=True)


if _AUTO_CONFIG in sys.modules:
    _register(sys.modules[_AUTO_CONFIG])
else:
    sys.meta_path.insert(0, _WhenLoaded())
