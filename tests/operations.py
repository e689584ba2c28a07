"""Operations and bytes of a model's forward and backward pass, recorded on `meta` tensors.

An operation is one dispatched op that is not a view or an allocation; a custom op (`nsa::…`) is
one. Its bytes are those of its tensor inputs and outputs; a modified input is read and written.
Of the embedding table and its gradient only one row per token counts. Launches are the kernels and
PyTorch ops inside custom ops: the library's launchers run on `meta` tensors, and a kernel's bytes
are those of its tensor arguments, each once, or twice if it is read and overwritten. Weights lie in
one flat buffer, as ZeRO-1 and 2 place them.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._library.custom_ops import _maybe_get_opdef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa.model import LanguageModel, ModelConfig
from nsa.ops.custom_op import IMPLEMENTATIONS
from tests.kernel_launches import Launch, recording

# Ops by name, without `triton_`, `_backward` and the in-place `_`.
PARTS: dict[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::bmm", "aten::cat"),
    "selector loss": ("nsa::selector_loss", "aten::addmm", "aten::stack"),
    "attention": (
        *("nsa::gated", "nsa::selected", "nsa::select"),
        "aten::_scaled_dot_product_flash_attention",
    ),
    "RoPE and pooling": (
        "nsa::rotary_pool",
        "nsa::pool",
        *("aten::arange", "aten::pow", "aten::cos", "aten::sin", "aten::_to_copy"),
        *("aten::searchsorted", "aten::lt", "aten::where", "aten::new_zeros"),
    ),
    "norms and residual": ("nsa::rms_norm", "nsa::add_rms_norm", "aten::add"),
    "SwiGLU": ("nsa::swiglu",),
    "loss": (
        "nsa::linear_cross_entropy",
        *("aten::ne", "aten::sum", "aten::clamp", "aten::div", "aten::ones_like", "aten::mul"),
    ),
    "embedding": ("aten::embedding", "aten::embedding_dense"),
    "other": (),
}
_PART_OF = {name: part for part, names in PARTS.items() for name in names}
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
# By kernel: an argument that it reads and overwrites, and the constant that enables this, if any.
_REWRITTEN = {
    "cross_entropy_kernel": ("logits", "GRADIENT"),
    "band_keys_kernel": ("dq", None),
    "selected_queries_kernel": ("dq", "ADD"),
}
_SELF_UNREAD = {"copy_", "fill_", "zero_", "new_zeros", "zeros_like", "ones_like"}


@dataclass(frozen=True)
class LaunchCost:
    """Name and bytes of a launched kernel or PyTorch op."""

    name: str
    bytes: int
    launch: Launch | None = None  # of a kernel of nsa.ops


@dataclass(frozen=True)
class Operation:
    """One dispatched op and its launches."""

    name: str
    part: str
    bytes: int
    launches: tuple[LaunchCost, ...]


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"):
            with self:  # linear and matmul inside custom ops: views and products
                composite = func.decompose(*args, **kwargs)
            if composite is not NotImplemented:
                return composite
        result = func(*args, **kwargs)
        name = func._schema.name
        if func.is_view or name.removeprefix("aten::") in _FREE:
            return result
        moved = _moved_bytes(func, args, kwargs, result)
        if not moved:  # empty tensors: nothing is launched
            return result
        launches = _custom_op_launches(func, args, kwargs) or (LaunchCost(name, moved),)
        base = name.replace("::triton_", "::").removesuffix("_backward").removesuffix("_")
        part = _PART_OF.get(base, "other")
        self.operations.append(Operation(name, part, moved, launches))
        return result


def _stored_bytes(tree: Any) -> int:
    """Return the bytes of all tensors in a tree; an expanded dimension is stored once."""
    total = 0
    for x in tree_leaves(tree):
        if isinstance(x, Tensor) and x.numel():
            stored = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
            total += x.element_size() * math.prod(stored)
    return total


def _moved_bytes(func: Any, args: tuple, kwargs: Mapping[str, Any], result: Any) -> int:
    """Count the bytes of an op's inputs and outputs, and again of the inputs that it modifies."""
    schema, given = func._schema, dict(kwargs)
    given |= {argument.name: x for argument, x in zip(schema.arguments, args, strict=False)}
    given = _with_sampled_rows(given)
    modified = {x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write}
    unread = {x.name for x in schema.arguments if x.is_out}
    if schema.name.removeprefix("aten::") in _SELF_UNREAD:
        unread.add("self")
    read = [x for name, x in given.items() if name not in unread]
    written = [given.get(name) for name in modified]
    returned = result if isinstance(result, tuple | list) else (result,)
    if schema.name == "aten::embedding":  # at most one row per token moves
        read = [result if x is given["weight"] else x for x in read]
    written += [x for x, y in zip(returned, schema.returns, strict=False) if not y.alias_info]
    return _stored_bytes(read) + _stored_bytes(written)


def _custom_op_launches(
    func: Any, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[LaunchCost, ...]:
    """Return the launches inside a custom op, by running it on `meta` tensors; of others none."""
    run = IMPLEMENTATIONS.get(func._schema.name) or getattr(
        _maybe_get_opdef(func), "_init_fn", None
    )
    if run is None or func.namespace != "nsa":
        return ()
    # torch.autocast refuses `meta`.
    no_autocast = mock.patch.object(torch, "autocast", return_value=nullcontext())
    with torch.no_grad(), no_autocast, Recorder() as inside, recording() as launches:
        run(*args, **kwargs)
    ops = (cost for operation in inside.operations for cost in operation.launches)
    return (*ops, *(_kernel_cost(x) for x in launches))


def _kernel_cost(x: Launch) -> LaunchCost:
    name, arguments = x.kernel.__name__, _with_sampled_rows(x.arguments)
    moved = _stored_bytes(arguments) - _unread_bytes(name, arguments, x.constants)
    argument, condition = _REWRITTEN.get(name, ("", None))
    if condition is None or x.constants[condition]:
        moved += _stored_bytes(arguments.get(argument))
    # New tensors: autograd would copy a gradient that a record holds.
    shapes = {
        k: y.new_empty(y.shape) if isinstance(y, Tensor) else y for k, y in x.arguments.items()
    }
    return LaunchCost(name, moved, replace(x, arguments=shapes))


def _with_sampled_rows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, with the rows of q that the selector loss reads: its queries'."""
    if not {"q", "queries"} <= arguments.keys():
        return dict(arguments)
    return {**arguments, "q": arguments["q"][:, : len(arguments["queries"])]}


def _unread_bytes(kernel: str, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> int:
    """Count the bytes of arguments that a kernel does not read."""
    if kernel == "select_kernel" and arguments["cu"] is None:
        # A tile whose queries have no more candidates than they select skips q and lse.
        tokens, attention = arguments["q"].shape[1], constants["C"]
        skipped = min(attention.TOP * attention.SELECT, tokens)
        if skipped < tokens:
            skipped -= skipped % attention.QUERIES
        return _stored_bytes([arguments["q"], arguments["lse"]]) * skipped // tokens
    if kernel == "rotary_kernel":
        # It reads of `packed` what it writes: no padding, no keys that only pool_kernel reads.
        written = [x for name, x in arguments.items() if name not in ("packed", "cos", "sin")]
        return _stored_bytes(arguments["packed"]) - _stored_bytes(written)
    return 0


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Replace functions that `meta` decomposes by the ops that CUDA dispatches."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
        return flash(q, k, v, is_causal=is_causal)[0]

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def record_operations(
    config: ModelConfig, micro_batch: int, seq_len: int, dense: bool = False
) -> list[Operation]:
    """Return every operation of the forward and backward pass of one bf16 micro-batch.

    `dense`: of a sparse model's dense steps.
    """
    attention = replace(config.attention, backend="triton")
    with torch.device("meta"):
        model = LanguageModel(replace(config, attention=attention)).bfloat16()
        tokens = torch.empty(micro_batch, seq_len, dtype=torch.long)
    model.set_dense(dense)
    flatten_weights(model)
    with as_on_cuda(), Recorder() as recorder:
        model(tokens, labels=tokens).backward()
    return recorder.operations


def flatten_weights(model: nn.Module) -> None:
    """Move the matrices into one buffer, in the order of ZeRO-1 and 2 with our parameter groups."""
    weights = [weight for weight in model.parameters() if weight.dim() > 1]
    flat = weights[0].new_empty(sum(weight.numel() for weight in weights))
    for weight, part in zip(weights, flat.split([x.numel() for x in weights]), strict=True):
        weight.data = part.view_as(weight)
