"""Packed batches from the data loader through a model."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from nsa.data.batches import Batch, Samples
from nsa.data.token_store import TokenStore
from nsa.model import LanguageModel
from tests.model.models import tiny

EOS = 60


def batch(packing: str) -> Batch:
    """Two rows of 40 tokens, from documents of 5 to 30 tokens."""
    random = np.random.RandomState(0)
    lengths = random.randint(5, 31, 8)
    tokens = np.concatenate([np.append(random.randint(0, EOS, length), EOS) for length in lengths])
    store = TokenStore([tokens], EOS, 1.0)
    return Samples([store], seq_len=40, seed=0, packing=packing).batch(range(2))


@pytest.mark.parametrize("attention", ["mean", "pool", "mlp", "dense"])
def test_documents_of_a_packed_batch_do_not_affect_each_other(attention: str) -> None:
    """A document's logits have a gradient for its own token embeddings only."""
    packed = batch("documents")
    assert packed.cu_seqlens is not None
    torch.manual_seed(0)
    model = LanguageModel(tiny(attention))
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    model.embed.register_forward_hook(keep)
    logits = model(packed.input_ids, cu_seqlens=packed.cu_seqlens)
    bounds = list(pairwise(packed.cu_seqlens.tolist()))
    assert len(bounds) > 4
    for start, end in bounds:
        embedded[0].grad = None
        logits[0, start:end].square().sum().backward(retain_graph=True)
        assert embedded[0].grad is not None
        touched = embedded[0].grad[0].abs().sum(-1)
        assert (touched[start:end] > 0).all()
        assert (touched[:start] == 0).all()
        assert (touched[end:] == 0).all()


def test_the_last_token_of_a_document_has_no_loss() -> None:
    packed = batch("documents")
    ends = packed.input_ids[0] == EOS
    assert ends.any()
    model = LanguageModel(tiny())
    loss = model(packed.input_ids, labels=packed.labels, cu_seqlens=packed.cu_seqlens)
    logits = model(packed.input_ids, cu_seqlens=packed.cu_seqlens)
    inner = ~ends
    expected = torch.nn.functional.cross_entropy(logits[0, inner], packed.labels[0, inner])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
