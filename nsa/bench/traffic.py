"""`python -m nsa.bench traffic`: operations and bytes of a micro-batch of M7C, without a GPU.

An operation is one dispatched op that is not a view or an allocation; a custom op (`nsa::…`) is
one. Its bytes are those of its tensor inputs and outputs; a modified input is read and written.
Of the embedding table and its gradient only one row per token counts. Launches are the kernels and
PyTorch ops inside custom ops: the library's launchers run on `meta` tensors, and a kernel's bytes
are those of its tensor arguments, each once, or twice if it is read and overwritten. Weights lie in
one flat buffer, as ZeRO-1 and 2 place them.

Times are estimates. A launch takes the time of its bytes or of its FLOPs at the rates of
`roofline.PEAKS`, whichever is longer; launches follow each other without gaps. FLOPs of attention
kernels are those of `roofline.work`.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from torch.utils.flop_counter import flop_registry

from nsa.bench.options import Shape
from nsa.bench.results import Report, print_table, ratio
from nsa.bench.roofline import PEAKS, PeakRates, work
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.config import ACTIVATION_CHECKPOINTING, ATTENTION_KINDS, COMPRESSORS
from nsa.ops.custom_op import IMPLEMENTATIONS
from nsa.ops.triton.launch import Launch, recording

# Ops by name, without `triton_`, `_backward` and the in-place `_`.
PARTS: dict[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::bmm", "aten::cat"),
    "selector loss": ("nsa::selector_loss", "aten::addmm", "aten::stack"),
    "attention": ("nsa::gated", "aten::_scaled_dot_product_flash_attention"),
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
# By operation: a tensor of which at most one row per token moves, and a tensor with that many rows.
_ROWS_MOVED = {
    "aten::embedding": ("weight", "result"),
}
# By kernel: an argument that it reads and overwrites, and the constant that enables this, if any.
_REWRITTEN = {
    "cross_entropy_kernel": ("logits", "GRADIENT"),
    "band_keys_kernel": ("dq", None),
    "selected_queries_kernel": ("dq", "ADD"),
}
_SELF_UNREAD = {"copy_", "fill_", "zero_", "new_zeros", "zeros_like", "ones_like"}


@dataclass(frozen=True)
class LaunchCost:
    """Name, bytes and FLOPs of a launched kernel or PyTorch op."""

    name: str
    bytes: int
    flops: float = 0.0
    launch: Launch | None = None  # of a kernel of nsa.ops

    def seconds(self, chip: PeakRates) -> float:
        return max(self.bytes / chip.bytes, self.flops / chip.flops)


@dataclass(frozen=True)
class Operation:
    """One dispatched op and its launches."""

    name: str
    part: str
    bytes: int
    launches: tuple[LaunchCost, ...]

    @property
    def flops(self) -> float:
        return sum(x.flops for x in self.launches)

    def seconds(self, chip: PeakRates) -> float:
        """Estimate the time of the launches, one after another."""
        return sum(x.seconds(chip) for x in self.launches)


class Recorder(TorchDispatchMode):
    """Records every operation.

    `flops` holds those of attention kernels, by their names in `roofline.work`.
    """

    def __init__(self, flops: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._flops = flops or {}

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
        moved, flops = _moved_bytes(func, args, kwargs, result), 0.0
        if not moved:  # empty tensors: nothing is launched
            return result
        if count := flop_registry.get(func._overloadpacket):
            flops = count(*args, **kwargs, out_val=result)
            # A causal mask hides half of the pairs.
            flops *= 0.5 if "attention" in name else 1.0
        launches = _custom_op_launches(func, args, kwargs, self._flops)
        launches = launches or (LaunchCost(name, moved, flops),)
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
    if schema.name in _ROWS_MOVED:
        table, rows = _ROWS_MOVED[schema.name]
        moved_rows = (given | {"result": result})[rows]
        read, written = (
            [moved_rows if x is given[table] else x for x in y] for y in (read, written)
        )
    written += [x for x, y in zip(returned, schema.returns, strict=False) if not y.alias_info]
    return _stored_bytes(read) + _stored_bytes(written)


def _custom_op_launches(
    func: Any, args: tuple, kwargs: Mapping[str, Any], flops: Mapping[str, float]
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
    return (*ops, *(_kernel_cost(x, flops) for x in launches if 0 not in x.grid))


def _kernel_cost(x: Launch, flops: Mapping[str, float]) -> LaunchCost:
    name, arguments = x.kernel.__name__, _with_sampled_rows(x.arguments)
    if name in _ROWS_MOVED:
        table, rows = _ROWS_MOVED[name]
        arguments[table] = arguments[rows]
    moved = _stored_bytes(arguments) - _unread_bytes(name, arguments, x.constants)
    argument, condition = _REWRITTEN.get(name, ("", None))
    if condition is None or x.constants[condition]:
        moved += _stored_bytes(arguments.get(argument))
    # New tensors: autograd would copy a gradient that a record holds.
    shapes = {
        k: y.new_empty(y.shape) if isinstance(y, Tensor) else y for k, y in x.arguments.items()
    }
    return LaunchCost(name, moved, flops.get(_work_name(x), 0.0), replace(x, arguments=shapes))


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


def _work_name(x: Launch) -> str:
    """Return a kernel's name in `roofline.work`; a model's band kernels compute both branches."""
    name = x.kernel.__name__.removesuffix("_kernel").replace("band", "gated")
    return name.replace("_", " ")


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Replace functions that `meta` decomposes by the ops that CUDA dispatches."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
        return flash(q, k, v, is_causal=is_causal)[0]

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def record_operations(config: ModelConfig, micro_batch: int, seq_len: int) -> list[Operation]:
    """Return every operation of the forward and backward pass of one bf16 micro-batch."""
    attention = replace(config.attention, backend="triton")
    with torch.device("meta"):
        model = LanguageModel(replace(config, attention=attention)).bfloat16()
        tokens = torch.empty(micro_batch, seq_len, dtype=torch.long)
    flatten_weights(model)
    kernels = work(Shape.of(config), micro_batch, seq_len, config.attention.spec)
    with as_on_cuda(), Recorder({name: x.flops for name, x in kernels.items()}) as recorder:
        model(tokens, labels=tokens).backward()
    return recorder.operations


def flatten_weights(model: nn.Module) -> None:
    """Move the matrices into one buffer, in the order of ZeRO-1 and 2 with our parameter groups."""
    weights = [weight for weight in model.parameters() if weight.dim() > 1]
    flat = weights[0].new_empty(sum(weight.numel() for weight in weights))
    for weight, part in zip(weights, flat.split([x.numel() for x in weights]), strict=True):
        weight.data = part.view_as(weight)


def totals(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Return a row per part, and the total."""
    parts = {part: [x for x in operations if x.part == part] for part in PARTS}
    return [_row(part, members) for part, members in parts.items() if members] + [
        _row("total", operations)
    ]


def _row(part: str, operations: Iterable[Operation]) -> dict[str, Any]:
    operations = list(operations)
    return {
        "part": part,
        "operations": len(operations),
        "bytes": sum(x.bytes for x in operations),
        "launches": sum(len(x.launches) for x in operations),
        "launch_bytes": sum(y.bytes for x in operations for y in x.launches),
        "flops": sum(x.flops for x in operations),
        "seconds": {name: sum(x.seconds(chip) for x in operations) for name, chip in PEAKS.items()},
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--micro-batch", type=int, default=8, help="sequences (%(default)s)")
    add("--seq-len", type=int, default=2_048, help="tokens of a sequence (%(default)s)")
    add("--layers", type=int, default=12, help="transformer blocks (%(default)s)")
    add("--vocab", type=int, default=50_304, help="rows of the embedding (%(default)s)")
    add("--checkpointing", choices=ACTIVATION_CHECKPOINTING, default="none", help="(%(default)s)")
    add("--compressor", choices=COMPRESSORS, default="mean", help="φ of NSA (%(default)s)")
    add("--selector-loss", action="store_true", help="count NSA's selector loss too")
    add("--operations", action="store_true", help="list operations and launches by name too")


def run(report: Report) -> dict[str, Any]:
    """Count NSA and its dense twin; print a table of each."""
    flags = report.flags
    result: dict[str, Any] = {"estimate": "counts, and times from counts; not measurements"}
    tokens, rates = flags.micro_batch * flags.seq_len, {}
    print(f"{flags.micro_batch} x {flags.seq_len:,} tokens, checkpointing {flags.checkpointing}")
    for kind in ATTENTION_KINDS:
        weight = float(flags.selector_loss and kind == "nsa")
        config = ModelConfig(
            layers=flags.layers,
            vocab_size=flags.vocab,
            attention=AttentionConfig(kind=kind, compressor=flags.compressor, selector_loss=weight),
            activation_checkpointing=flags.checkpointing,
        )
        operations = record_operations(config, flags.micro_batch, flags.seq_len)
        rows = totals(operations)
        rates[kind] = {name: tokens / rows[-1]["seconds"][name] for name in PEAKS}
        result[kind] = [{"kind": kind, **row} for row in rows]
        _print(kind, rows, rates[kind])
        if flags.operations:
            _print_names(operations)
    result["tokens_per_s"] = rates
    result["nsa_over_dense"] = {x: ratio(rates["nsa"][x], rates["dense"][x]) for x in PEAKS}
    over = (f"{name} {value:.2f}" for name, value in result["nsa_over_dense"].items())
    print("\nNSA's tokens/s over dense, estimated:", ", ".join(over))
    print("These are upper bounds for one GPU: no gaps between launches, no optimizer step.")
    print("nsa plan takes the fraction of the peak that an H100 reached, gaps included: less.")
    return result


def _print(kind: str, rows: Sequence[Mapping[str, Any]], rates: Mapping[str, float]) -> None:
    heads = ["operations", "GB", "launches", "their GB", "TFLOP", *(f"{x} ms" for x in PEAKS)]
    lines = [[kind, *heads]]
    for row in rows:
        cells = [f"{row['operations']:,}", f"{row['bytes'] / 1e9:.2f}", f"{row['launches']:,}"]
        cells += [f"{row['launch_bytes'] / 1e9:.2f}", f"{row['flops'] / 1e12:.2f}"]
        lines.append([row["part"], *cells, *(f"{1e3 * x:.2f}" for x in row["seconds"].values())])
    lines.append(["tokens/s, estimated", *[""] * 5, *(f"{x:,.0f}" for x in rates.values())])
    print()
    print_table(lines)


def _print_names(operations: Sequence[Operation]) -> None:
    launches = [x for operation in operations for x in operation.launches]
    for title, items in (("operation", operations), ("launch", launches)):
        counts, moved = Counter[str](), Counter[str]()
        for item in items:
            counts[item.name] += 1
            moved[item.name] += item.bytes
        lines = [[title, "count", "GB"]]
        lines += [[x, f"{counts[x]:,}", f"{y / 1e9:.2f}"] for x, y in moved.most_common()]
        print()
        print_table(lines)
