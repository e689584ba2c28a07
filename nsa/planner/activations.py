"""Activation memory of a micro-batch on a GPU: live tensors of the model on the `meta` device.

Two layers are counted; each further one holds as much as the second. Attention runs the kernels
that a GPU would take, and each sequence is one document. Tensors that a custom op frees before it
returns are not seen; those of the loss, gigabytes of logits, are added.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa.model.attention import BranchKV
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.language_model import LanguageModel, meta_model
from nsa.model.loss import chunk_rows
from nsa.model.sequence_parallel import SequenceParallel
from nsa.planner.inputs import BatchShape, Model


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch's tensors; of the weights' gradients only what is not yet reduced."""

    before_loss: int  # held for the backward pass
    loss: int  # more, at the peak of the loss: logits and gradients of the head
    last_layer: int  # at the peak of the backward pass down to the last layer
    first_layer: int  # at its peak from there down to the first layer
    embedding: int  # at its peak in the embedding


@cache
def activations(model: Model, batch: BatchShape) -> Activations:
    """Count the activations of all layers."""
    layers = model.config.layers
    counted = count_layers(model, batch, min(layers, 2))
    more = max(0, layers - 2)
    if more:
        more *= counted.before_loss - count_layers(model, batch, 1).before_loss
    held = {name: getattr(counted, name) + more for name in ("before_loss", "last_layer")}
    return replace(counted, **held)


def count_layers(model: Model, batch: BatchShape, layers: int) -> Activations:
    """Run a forward and a backward pass of a model with this many layers on `meta` tensors."""
    mode = "reentrant" if batch.checkpointing == "deepspeed" else batch.checkpointing
    attention = replace(model.config.attention, backend="auto")
    config = replace(
        model.config, layers=layers, attention=attention, activation_checkpointing=mode
    )
    dtype = torch.bfloat16 if model.weight_bytes == 2 else torch.float32
    ranks = batch.ranks_per_sequence
    net = meta_model(config, _RanksOfASequence(ranks) if ranks > 1 else None).to(dtype)
    if attention.kind == "dense":
        for name, module in net.named_modules():
            if name.endswith(".attention"):
                vars(module)["attend"] = _flash_attention
    live = _LiveTensors()
    _free_gradients(net, live)
    width = 0 if model.teacher is None else model.teacher.width
    head = torch.empty(model.config.vocab_size, width, device="meta", dtype=dtype)
    shape = batch.micro_batch, batch.seq_len // ranks
    with live:
        tokens, labels = (torch.empty(shape, device="meta", dtype=torch.long) for _ in range(2))
        teacher = (head.new_empty(batch.tokens, width), head) if width else None
        loss = net(tokens, labels=labels, teacher=teacher)
        live.begin("last_layer")
        loss.backward()
    before = live.before_loss
    peaks = {name: live.peaks[name] for name in ("last_layer", "first_layer", "embedding")}
    return Activations(before, live.peaks["forward"] - before, **peaks)


def _free_gradients(net: LanguageModel, live: _LiveTensors) -> None:
    """Free each gradient when it has arrived, and begin the spans of the backward pass."""

    # The last gradient of each block, and the span that begins with it.
    last = {net.get_parameter(f"blocks.{len(net.blocks) - 1}.attention_norm.weight"): "first_layer"}
    last[net.get_parameter("blocks.0.attention_norm.weight")] = "embedding"

    def arrived(weight: Tensor) -> None:
        weight.grad = None
        assert isinstance(weight, torch.nn.Parameter)
        if weight in last:
            live.begin(last[weight])

    for weight in net.parameters():
        weight.register_post_accumulate_grad_hook(arrived)


class _LiveTensors(TorchDispatchMode):
    """Bytes of the storages that operations create, until they are freed, and their peaks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.before_loss = 0
        self.peaks = Counter[str]()  # by span of the passes
        self._span = "forward"
        self._storages: dict[int, Any] = {}

    def begin(self, span: str) -> None:
        self._span = span
        self._record()

    def _record(self, more: int = 0) -> None:
        self.peaks[self._span] = max(self.peaks[self._span], self.bytes + more)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        if func is torch.ops.nsa.linear_cross_entropy.default:
            self.before_loss = self.bytes
            self._record(loss_bytes(*args[:2]))
        result = func(*args, **(kwargs or {}))
        for x in filter(_is_tensor, tree_leaves(result)):
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in given and key not in self._storages:
                self._storages[key] = weakref.finalize(storage, self._free, key, size)
                self.bytes += size
                self._record()
        return result

    def _free(self, key: int, size: int) -> None:
        del self._storages[key]
        self.bytes -= size


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


def loss_bytes(hidden: Tensor, weight: Tensor) -> int:
    """Return the most bytes that the head's loss allocates: a chunk's logits, and gradients.

    A second chunk's gradient of the weight needs a tensor of its own; those of more chunks are
    summed in float32.
    """
    rows = chunk_rows(hidden, weight)
    chunks, size = -(-len(hidden) // rows), hidden.element_size()
    gradients = {1: size, 2: 2 * size}.get(chunks, 2 * size + 4) * weight.numel()
    return size * rows * len(weight) + hidden.nbytes + gradients


def _flash_attention(q: Tensor, _: None, kv: BranchKV, metadata: AttentionMetadata) -> Tensor:
    """Dense attention by the op that CUDA dispatches; `meta` would form all scores."""
    size = max(x.shape[-1] for x in (q, *kv["all"]))
    q, k, v = (
        (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))).transpose(1, 2)
        for x in (q, *kv["all"])
    )
    o = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    return o.transpose(1, 2)[..., : kv["all"][1].shape[-1]]


class _RanksOfASequence(SequenceParallel):
    """The size of a group of ranks alone: an exchange of `meta` tensors has a shape."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self._group: Any = SimpleNamespace(group_name="")

    def sum(self, x: Tensor) -> Tensor:
        return x.detach().clone()
