"""Sequence parallelism on two ranks: losses and gradients against a single rank."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import AttentionConfig, LanguageModel
from nsa.model.config import COMPRESSORS
from nsa.model.sequence_parallel import SequenceParallel
from nsa.spec import NSASpec
from tests.model.models import IMPORTED, build, packed, tiny, tokens

# One document, with its blocks and windows, crosses the border between the ranks.
DOCUMENTS = {2_048: packed(350, 3, 1_250, 0, 445), 512: packed(70, 3, 250, 0, 189)}
SPEC = NSASpec(32, 16, 64, 6, 1, 2, 96)
NSA = {x: AttentionConfig(spec=SPEC, compressor=x) for x in COMPRESSORS}
INDEX = AttentionConfig(branches="sel", selector_loss=3.0, spec=NSASpec(32, 16, 32, 6, 1, 2))
ATTENTIONS = {
    **NSA,
    **{f"{name}, selector loss": replace(x, selector_loss=3.0) for name, x in NSA.items()},
    "index": replace(INDEX, compressor="pool", spec=NSASpec(32, 32, 32, 6, 1, 2)),
    "index, mean": INDEX,
    "dense": AttentionConfig(kind="dense"),
}


def labels_of(ids: Tensor, batch: str) -> Tensor:
    """The next tokens, most of the first rank's ignored, so that the ranks' means differ."""
    labels = ids.roll(-1, 1)
    labels[:, : int(0.45 * ids.shape[1])] = -100
    if batch == "all ignored":
        labels[:] = -100
    return labels


def step(
    model: LanguageModel, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None, teacher: Tensor
) -> Tensor:
    """`teacher`: the input of a teacher's head [B, T, 24], or empty."""
    model.zero_grad()
    head = (teacher.flatten(0, 1), torch.eye(61, 24).double()) if teacher.numel() else None
    loss = model(ids, labels=labels, cu_seqlens=cu_seqlens, teacher=head)
    loss.backward()
    return loss.detach()


def compare(
    attention: str, mode: str, batch: str, length: int, sequence: SequenceParallel
) -> dict[str, object]:
    """The largest relative error of loss and gradients against a single rank."""
    config = tiny(ATTENTIONS[attention.removesuffix(", imported")])
    if attention.endswith(", imported"):
        config = replace(config, **IMPORTED)
    cu_seqlens = DOCUMENTS[length] if batch == "documents" else None
    ids = tokens(length, batch=2 if batch == "rows" else 1)
    labels = labels_of(ids, batch)
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(1, length * (batch == "teacher"), 24, generator=draw).double()
    single = build(config, std=0.3)
    expected = step(single, ids, labels, cu_seqlens, states)
    split = LanguageModel(replace(config, activation_checkpointing=mode), sequence).double()
    split.load_state_dict(single.state_dict())
    part = slice(sequence.rank * length // 2, (sequence.rank + 1) * length // 2)
    loss = step(split, ids[:, part], labels[:, part], cu_seqlens, states[:, part])
    errors = {"loss": float((loss - expected).abs())}
    single_parameters = dict(single.named_parameters())
    for name, parameter in split.named_parameters():
        assert parameter.grad is not None, name
        dist.all_reduce(parameter.grad)
        gradient, size = single_parameters[name].grad, 1.0
        assert gradient is not None
        if batch != "all ignored":
            size = float(gradient.norm())
            assert size > 0, name
        errors[name] = float((parameter.grad / 2 - gradient).norm()) / size  # as ZeRO averages
    worst = max(errors, key=lambda name: errors[name])
    case = [attention, mode, batch, length]
    return {"case": case, "worst": worst, "error": errors[worst]}


def main() -> None:
    start_ranks(Ranks.from_environment())
    sequence = SequenceParallel(dist.new_group())
    for attention, mode, batch, length in json.loads(sys.argv[1]):
        print(json.dumps(compare(attention, mode, batch, length, sequence)), flush=True)


if __name__ == "__main__":
    main()
    stop_ranks()
