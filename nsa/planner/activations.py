"""Activation memory of a micro-batch on a GPU: live tensors of the model on the `meta` device.

Two layers are counted; each further one holds as much as the second. Attention runs the kernels
that a GPU would take, and each sequence is one document. Tensors that a custom op frees before it
returns are not seen; only the tensors of the loss, gigabytes of logits, are added.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
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
from nsa.planner.inputs import BatchShape, Model


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch's tensors; not counted: a weight's gradient once it is complete."""

    before_loss: int  # when the loss begins: what the layers hold for the backward pass
    loss: int  # added to before_loss at the peak of the loss: logits and gradients of the head
    last_layer: int  # at the peak of the backward pass of head and last layer
    first_layer: int  # at the peak of the backward pass of the other layers
    embedding: int  # at the peak of the backward pass of the embedding


@cache
def activations(model: Model, batch: BatchShape) -> Activations:
    layers = model.config.layers
    if layers <= 2:
        return count_layers(model, batch, layers)
    one, two = count_layers(model, batch, 1), count_layers(model, batch, 2)
    further = (layers - 2) * (two.before_loss - one.before_loss)
    return replace(two, before_loss=two.before_loss + further, last_layer=two.last_layer + further)


def count_layers(model: Model, batch: BatchShape, layers: int) -> Activations:
    """Run a forward and a backward pass of a model with this many layers on `meta` tensors."""
    mode = "reentrant" if batch.checkpointing == "deepspeed" else batch.checkpointing
    attention = replace(model.config.attention, backend="auto")
    config = replace(
        model.config, layers=layers, attention=attention, activation_checkpointing=mode
    )
    dtype = torch.bfloat16 if model.weight_bytes == 2 else torch.float32
    net = meta_model(config).to(dtype)
    if attention.kind == "dense":
        for block in net.blocks:
            vars(block.attention)["attend"] = _flash_attend
    live = _LiveTensors()
    _free_gradients(net, live)
    width = 0 if model.teacher is None else model.teacher.width
    head = torch.empty(model.config.vocab_size, width, device="meta", dtype=dtype)
    shape = batch.micro_batch, batch.seq_len
    with live:
        tokens, labels = (torch.empty(shape, device="meta", dtype=torch.long) for _ in range(2))
        teacher = (head.new_empty(batch.tokens, width), head) if width else None
        loss = net(tokens, labels=labels, teacher=teacher)
        live.begin("last_layer")
        loss.backward()
    return Activations(
        before_loss=live.before_loss,
        loss=live.peaks["forward"] - live.before_loss,
        last_layer=live.peaks["last_layer"],
        first_layer=live.peaks["first_layer"],
        embedding=live.peaks["embedding"],
    )


def _free_gradients(net: LanguageModel, live: _LiveTensors) -> None:
    """Free each gradient when it is complete, and begin the spans of the backward pass.

    The gradient of attention_norm is the last of its block: when it is complete, a span ends.
    """
    last = len(net.blocks) - 1
    next_span = {
        net.get_parameter(f"blocks.{last}.attention_norm.weight"): "first_layer",
        net.get_parameter("blocks.0.attention_norm.weight"): "embedding",
    }

    def free(weight: Tensor) -> None:
        weight.grad = None
        assert isinstance(weight, torch.nn.Parameter)
        if weight in next_span:
            live.begin(next_span[weight])

    for weight in net.parameters():
        weight.register_post_accumulate_grad_hook(free)


class _LiveTensors(TorchDispatchMode):
    """Counts the bytes of storages that operations create until they are freed, and the peaks."""

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
        arguments = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        in_arguments = {x.untyped_storage()._cdata for x in arguments}
        if func is torch.ops.nsa.linear_cross_entropy.default:
            self.before_loss = self.bytes
            self._record(loss_bytes(*args[:2]))
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in in_arguments and key not in self._storages:
                self._storages[key] = weakref.finalize(storage, self._free, key, size)
                self.bytes += size
                self._record()
        return result

    def _free(self, key: int, size: int) -> None:
        del self._storages[key]
        self.bytes -= size


def loss_bytes(hidden: Tensor, weight: Tensor) -> int:
    """Return the most bytes that the head's loss allocates: a chunk's logits, and gradients."""
    rows = chunk_rows(hidden, weight)
    chunks, size = math.ceil(len(hidden) / rows), hidden.element_size()
    logits = size * rows * len(weight)
    weight_gradient = size
    if chunks > 1:
        weight_gradient += size  # a further chunk's gradient, before it is added
    if chunks > 2:
        weight_gradient += 4  # more than two are summed in float32
    return logits + hidden.nbytes + weight_gradient * weight.numel()


def _flash_attend(q: Tensor, _: None, kv: BranchKV, metadata: AttentionMetadata) -> Tensor:
    """Replace `Attention.attend`: on `meta`, PyTorch would allocate all scores, a GPU does not."""
    size = max(x.shape[-1] for x in (q, *kv["all"]))
    q, k, v = (
        (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))).transpose(1, 2)
        for x in (q, *kv["all"])
    )
    o = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    return o.transpose(1, 2)[..., : kv["all"][1].shape[-1]]
