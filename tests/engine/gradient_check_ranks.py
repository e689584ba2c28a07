"""Runs on two ranks: models that break the rule of one gradient per backward pass; DDP on them."""

import json
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nsa.engine.checks import inspect_gradients
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import LanguageModel
from tests.engine.small import small


class HeadInside(LanguageModel):
    """The tied head runs inside a reentrant segment, the embedding outside."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        head = partial(F.linear, weight=self.embed.weight)
        logits = checkpoint(head, self.hidden(input_ids), use_reentrant=True)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SkipsOnOneRank(LanguageModel):
    """Rank 1 skips the last block, as a branch that depends on the input would."""

    def forward(self, input_ids: Tensor, **kwargs: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            self.blocks = self.blocks[:1]
        return super().forward(input_ids, **kwargs)


class Unused(LanguageModel):
    """The last block has no part in the loss."""

    def forward(self, input_ids: Tensor, **kwargs: Tensor) -> Tensor:
        blocks, self.blocks = self.blocks, self.blocks[:1]
        loss = super().forward(input_ids, **kwargs)
        self.blocks = blocks
        return loss


class RepeatsOnOneRank(LanguageModel):
    """Rank 1 runs the first block twice."""

    def forward(self, input_ids: Tensor, **kwargs: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            self.blocks = nn.ModuleList([self.blocks[0], *self.blocks])
        return super().forward(input_ids, **kwargs)


def build(name: str) -> LanguageModel:
    torch.manual_seed(3)
    model = {
        "head inside": HeadInside,
        "skips on one rank": SkipsOnOneRank,
        "repeats on one rank": RepeatsOnOneRank,
        "unused": Unused,
    }.get(name, LanguageModel)(small().model)
    if name == "shared block":
        model.blocks[1] = model.blocks[0]  # its parameters are then in two checkpoint segments
    return model


def main() -> None:
    start_ranks(Ranks.from_environment())
    tokens = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(dist.get_rank()))
    names = "sound", "shared block", "head inside", "skips on one rank", "repeats on one rank"
    for name in names:
        twice, missing = inspect_gradients(build(name), tokens)
        print(json.dumps({"model": name, "twice": twice, "missing": missing}))
    for name in ("sound", "shared block"):
        model = DistributedDataParallel(build(name))
        try:
            model(tokens, labels=tokens).backward()
            print(json.dumps({"model": f"{name} under DDP", "error": None}))
        except RuntimeError as error:
            print(json.dumps({"model": f"{name} under DDP", "error": str(error)}))


if __name__ == "__main__":
    main()
    stop_ranks()
