"""Runs on two ranks: models that break the rule of one gradient a backward pass, and DDP's fate."""

from __future__ import annotations

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nsa.engine.config import RunConfig
from nsa.engine.gradient_check import inspect_gradients
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import LanguageModel
from nsa.model.layout import Layout
from tests.engine.small import small


def sound(config: RunConfig) -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(config.model)


def shared_block(config: RunConfig) -> LanguageModel:
    """Both layers are the same block: its parameters are in two segments."""
    model = sound(config)
    model.blocks[1] = model.blocks[0]
    return model


class HeadInside(LanguageModel):
    """The tied head runs inside a reentrant segment while the embedding runs outside."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        layout = Layout.of(
            input_ids.shape[1], None, self.config.attention.spec, 8, 1e4, input_ids.device
        )
        x = self.embed(input_ids)
        for block in self.blocks:
            x = checkpoint(partial(block, layout=layout), x, use_reentrant=True)
        logits = checkpoint(
            lambda x: F.linear(self.norm(x), self.embed.weight), x, use_reentrant=True
        )
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def head_inside(config: RunConfig) -> LanguageModel:
    torch.manual_seed(3)
    return HeadInside(config.model)


class SkipsOnOneRank(LanguageModel):
    """Rank 1 leaves the last block out, as a branch that depends on the input would."""

    def forward(self, input_ids: Tensor, **rest: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            self.blocks = self.blocks[:1]
        return super().forward(input_ids, **rest)


def skips_on_one_rank(config: RunConfig) -> LanguageModel:
    torch.manual_seed(3)
    return SkipsOnOneRank(config.model)


MODELS = {
    "sound": sound,
    "shared block": shared_block,
    "head inside": head_inside,
    "skips on one rank": skips_on_one_rank,
}


def main() -> None:
    start_ranks(Ranks.from_environment())
    tokens = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(dist.get_rank()))
    if sys.argv[1] == "ddp":
        model = DistributedDataParallel(MODELS[sys.argv[2]](small(sys.argv[3])))
        try:
            model(tokens, labels=tokens).backward()
            print("backward passed")
        except RuntimeError as error:
            print(f"RuntimeError: {error}")
        return
    for name, build in MODELS.items():
        report = inspect_gradients(build(small()), tokens)
        print(json.dumps({"model": name, "twice": report.twice, "missing": report.missing}))


if __name__ == "__main__":
    main()
    stop_ranks()
