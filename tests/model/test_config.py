"""Model configuration: errors name the setting, its value and the fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa.model import AttentionConfig, LanguageModel
from nsa.spec import NSASpec
from tests.model.models import ONE_KEY, PER_TOKEN, SPEC, tiny

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layers": 0}, r"^model\.layers = 0: must be a whole number, 1 or more$"),
    ({"vocab_size": 50_304.0}, r"^model\.vocab_size = 50304\.0: must be a whole number"),
    ({"layers": True}, r"^model\.layers = True: must be a whole number"),
    (
        {"heads": 12, "kv_heads": 5},
        r"^model\.heads = 12: not a multiple of model\.kv_heads = 5; change one of them$",
    ),
    ({"head_dim": 7}, r"^model\.head_dim = 7: RoPE rotates pairs; make it even$"),
    ({"value_dim": 4.5}, r"^model\.value_dim = 4\.5: "),
    (
        {"activation_checkpointing": "full"},
        r"^model\.activation_checkpointing = 'full': choose one of none, reentrant, ",
    ),
    (
        {"attention": AttentionConfig(kind="sparse")},
        r"^model\.attention\.kind = 'sparse': choose one of nsa, dense$",
    ),
    (
        {"attention": AttentionConfig(compressor="max")},
        r"^model\.attention\.compressor = 'max': choose one of mean, pool, mlp$",
    ),
    (
        {"attention": AttentionConfig(backend="cuda")},
        r"^model\.attention\.backend = 'cuda': choose one of auto, triton, blockwise, reference$",
    ),
    *(
        ({"attention": AttentionConfig(branches=x)}, r"attention\.branches = .*: choose one of cmp")
        for x in ("sel+cmp", "", "window", "cmp+cmp")
    ),
    (
        {"attention": AttentionConfig(branches="sel+win", compressor="mlp")},
        r"branches = 'sel\+win'; add cmp, or set it to mean$",
    ),
    *(
        (
            {"attention": AttentionConfig(selector_loss=1.0, **x)},
            r"selector_loss = 1\.0: needs kind",
        )
        for x in ({"branches": "cmp+sel"}, {"kind": "dense"})
    ),
    (
        {"attention": AttentionConfig(selector_loss=-1.0)},
        r"^model\.attention\.selector_loss = -1\.0: must be 0 or more",
    ),
    (
        {"attention": AttentionConfig(spec=SPEC, branches="sel")},
        r"window = 6: branches=sel has no window; remove it and set local_blocks",
    ),
    (
        {"attention": AttentionConfig(spec=NSASpec(4, 4, 4, 2, 1, 1), branches="sel")},
        r"select_top = 2: leaves the index nothing .* to 3 or",
    ),
    (
        {"attention": AttentionConfig(spec=ONE_KEY, branches="sel", compressor="mlp")},
        r"compressor = 'mlp': .* set it to pool or mean",
    ),
    (
        {"attention": AttentionConfig(spec=PER_TOKEN, branches="sel", compressor="pool")},
        r"compressor = 'pool': .* set it to mean",
    ),
    ({"rope_theta": 0.0}, r"^model\.rope_theta = 0\.0: "),
    ({"norm_eps": -1e-5}, r"^model\.norm_eps = -1e-05: "),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_an_invalid_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    config = replace(tiny(), **changes)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_building_a_model_validates_its_config() -> None:
    with pytest.raises(ValueError, match=r"model\.head_dim = 5"):
        LanguageModel(tiny(head_dim=5))
