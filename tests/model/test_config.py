"""Model configuration: errors name the setting, its value and the fix."""

import math
from dataclasses import replace
from typing import Any

import pytest

from nsa.model import AttentionConfig, LanguageModel
from nsa.spec import NSASpec
from tests.model.models import IMPORTED, ONE_KEY, PER_TOKEN, SPEC, tiny

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layers": 0}, r"^model\.layers = 0: must be a whole number, 1 or more$"),
    ({"vocab_size": 50_304.0}, r"^model\.vocab_size = 50304\.0: must be a whole number"),
    ({"layers": True}, r"^model\.layers = True: must be a whole number"),
    ({"layers": 1_025}, r"^model\.layers = 1025: must be 1,024 or less$"),
    ({"width": 2**20 + 1}, r"^model\.width = 1048577: must be 1,048,576 or less$"),
    ({"no_rope_every": -1}, r"^model\.no_rope_every = -1: must be a whole number, 0 or more$"),
    (
        {"heads": 12, "kv_heads": 5},
        r"^model\.heads = 12: not a multiple of model\.kv_heads = 5; change one of them$",
    ),
    ({"head_dim": 7}, r"^model\.head_dim = 7: RoPE rotates pairs; make it even$"),
    ({"value_dim": 4.5}, r"^model\.value_dim = 4\.5: "),
    ({"activation_checkpointing": "full"}, "'full': choose one of none, reentrant, "),
    ({"rope_theta": 0.0}, r"^model\.rope_theta = 0\.0: "),
    ({"rope_theta": math.nan}, r"^model\.rope_theta = nan: must be a number above 0$"),
    ({"rope_type": "linear"}, r"^model\.rope_extension = None: rope_type linear needs factor; add"),
    *(
        ({"rope_type": "linear", "rope_extension": {"factor": 2.0} | other}, message)
        for other, message in (
            ({"factor": 0.5}, r": factor = 0\.5 must be a number, 1 or more$"),
            ({"factor": "2"}, r": factor = '2' must be a number, 1 or more$"),
            ({"factor": math.nan}, r": factor = nan must be a number, 1 or more$"),
            ({"beta_fast": 1.0}, "rope_type linear does not read beta_fast; remove it$"),
        )
    ),
    (
        IMPORTED | {"rope_extension": IMPORTED["rope_extension"] | {"beta_fast": -1.0}},
        r": beta_fast = -1\.0 must be a number, 0 or more$",
    ),
    ({"norm_eps": -1e-5}, r"^model\.norm_eps = -1e-05: "),
]
OF_ATTENTION: list[tuple[dict[str, Any], str]] = [
    ({"kind": "sparse"}, "kind = 'sparse': choose one of nsa, dense$"),
    ({"compressor": "max"}, "compressor = 'max': choose one of mean, pool, mlp$"),
    ({"backend": "cuda"}, "backend = 'cuda': choose one of auto, triton, blockwise, reference$"),
    *(
        ({"branches": x}, "branches = .*: choose one of cmp")
        for x in ("sel+cmp", "", "window", "cmp+cmp")
    ),
    ({"branches": "sel+win", "compressor": "mlp"}, r".*'sel\+win'; add cmp, or set it to mean$"),
    ({"selector_loss": 1.0, "branches": "cmp+sel"}, "selector_loss = .*needs kind .*set it to 0$"),
    ({"selector_loss": 1.0, "kind": "dense"}, "selector_loss = .*needs kind .*; set it to 0$"),
    ({"selector_loss": -1.0}, r"selector_loss = -1\.0: must be 0 or more"),
    ({"selector_loss": math.nan}, r"selector_loss = nan: must be 0 or more"),
]
OF_AN_INDEX: list[tuple[NSASpec, str, str]] = [
    (SPEC, "mean", "spec.window = 6: branches=sel has no window; remove it and set local_blocks"),
    (NSASpec(4, 4, 4, 2, 1, 1), "mean", "spec.select_top = 2: leaves the index nothing .* to 3 or"),
    (ONE_KEY, "mlp", "compressor = 'mlp': .* set it to pool or mean"),
    (PER_TOKEN, "pool", "compressor = 'pool': .* set it to mean"),
]
OF_ATTENTION += [
    ({"branches": "sel", "spec": spec, "compressor": compressor}, message)
    for spec, compressor, message in OF_AN_INDEX
]
REFUSED += [
    ({"attention": AttentionConfig(**changes)}, rf"^model\.attention\.{message}")
    for changes, message in OF_ATTENTION
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_an_invalid_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    config = replace(tiny(), **changes)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_the_options_of_yarn_are_accepted() -> None:
    options = IMPORTED["rope_extension"] | {"beta_fast": 16.0, "truncate": False}
    tiny(**IMPORTED | {"rope_extension": options}).validate()


def test_building_a_model_validates_its_config() -> None:
    with pytest.raises(ValueError, match=r"model\.head_dim = 5"):
        LanguageModel(tiny(head_dim=5))
