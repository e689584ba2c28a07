"""`nsa doctor --tune`: time every candidate for the kernels' tile sizes here, keep the fastest.

If several libraries have a kernel for an operation, the fastest library is kept in the same way.
Results are stored per operation, head sizes, dtype and class of length (short or long), and later
launches read them. `python -m nsa.ops.tune` does the same where only PyTorch and Triton are.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops import (
    compress_mean,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.decode import decode_attention
from nsa.ops.triton.configs import SHORT, Config, override_choices, save_tuned, tuning_key
from nsa.ops.triton.launch import Launch, launch, padded_size, recording
from nsa.spec import NSASpec

SPEC, DTYPE = NSASpec(), torch.bfloat16
M7C = "12x2x64"
LENGTHS, TOKENS = (2_048, 16_384), 32_768  # of a sequence, one in each class; of a batch
WARM_UP_MS, TIMED_MS = 50, 300  # of each candidate

Step = Callable[[], object]
Time = Callable[[Step], float]  # milliseconds of a call
Option = Config | str  # tile sizes, or the library whose kernel runs


class Heads(NamedTuple):
    """Query heads, key/value heads, key size, value size."""

    heads: int
    kv_heads: int
    key: int
    value: int


@dataclass
class TunedOperation:
    """An operation's candidates, and the calls that run it."""

    options: list[Any]
    steps: dict[str, Step]


def parse_heads(text: str) -> Heads:
    """Parse heads x KV heads x key size [x value size]."""
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}", text):
        heads, kv_heads, key, *value = map(int, text.split("x"))
        if heads % kv_heads == 0:
            return Heads(heads, kv_heads, key, *(value or [key]))
    raise ValueError(
        f"--tune {text}: not the heads of a model; write heads x KV heads x size, for example {M7C}"
    )


def tune_device(heads: Sequence[Heads]) -> Iterator[str]:
    """Tune the operations of these heads on the GPU; store the fastest, yield a line for each."""
    if not torch.cuda.is_available():
        raise ValueError("--tune: PyTorch sees no GPU; run it on the machine that has one")
    by_sizes: dict[tuple[int, int], list[Heads]] = {}
    for shape in heads:
        by_sizes.setdefault((padded_size(shape.key), padded_size(shape.value)), []).append(shape)
    for sizes, shapes in by_sizes.items():
        for seq_len in LENGTHS:
            steps = dict[str, Step]()
            for shape in shapes:
                steps |= calls(shape, seq_len, TOKENS, torch.device("cuda"))
            yield from _tune_class(steps, sizes, seq_len)


def _tune_class(steps: dict[str, Step], sizes: tuple[int, int], seq_len: int) -> Iterator[str]:
    # nsa_attention has kernels of its own; other functions' kernels are tuned in their own calls.
    combined = {name: steps.pop(name) for name in list(steps) if name.startswith("nsa_attention")}
    for name, operation in (discover(combined) | discover(steps)).items():
        if len(operation.options) > 1:
            best, times = fastest(name, operation, time_on_gpu)
            key = key_of(name, sizes, DTYPE, seq_len)
            if best is not None:
                save_tuned({key: best})
            fields = (f"{option} {ms:.3g} ms" for option, ms in times.items())
            yield f"{key}: {'no candidate runs' if best is None else best}  ({'; '.join(fields)})"


def time_on_gpu(step: Step) -> float:
    """Return a call's median milliseconds."""
    from triton.testing import do_bench

    return do_bench(step, warmup=WARM_UP_MS, rep=TIMED_MS, return_mode="median")


def key_of(operation: str, sizes: tuple[int, int], dtype: torch.dtype, seq_len: int) -> str:
    """Return the key that a launch looks up; selection reads no values, decoding has one class."""
    if operation == "select":
        sizes = sizes[0], 0
    if operation == "gathered_decode":
        seq_len = SHORT
    return tuning_key(operation, sizes, dtype, seq_len)


def calls(shape: Heads, seq_len: int, tokens: int, device: torch.device) -> dict[str, Step]:
    """Return calls of every function, forward and backward, and of a decoding step."""
    batch = max(1, tokens // seq_len)

    def normal(heads: int, size: int) -> Tensor:
        x = torch.randn(batch, seq_len, heads, size, device=device, dtype=DTYPE)
        return x.requires_grad_()

    q, gates = normal(shape.heads, shape.key), normal(shape.heads, 3).detach().sigmoid()
    k, v = normal(shape.kv_heads, shape.key), normal(shape.kv_heads, shape.value)
    k_cmp, v_cmp = (compress_mean(x.detach(), SPEC).requires_grad_() for x in (k, v))
    # Neighbouring queries of `q` select unrelated blocks, neighbours of `local` nearly equal ones;
    # trained queries are somewhere between.
    shared = torch.randn_like(q[:, : SPEC.select_blocks_len(seq_len)])
    local = shared.repeat_interleave(SPEC.select_len, 1)[:, :seq_len] + 0.1 * torch.randn_like(q)

    def blocks(queries: Tensor) -> Tensor:
        with torch.no_grad():
            _, lse = compressed_attention(queries, k_cmp, v_cmp, SPEC, backend="triton")
            return select_blocks(queries, k_cmp, lse, SPEC, backend="triton")

    def trained(function: Callable[..., Tensor], *inputs: Tensor) -> Step:
        o = function(*inputs)
        trained_inputs, do = [x for x in inputs if x.requires_grad], torch.randn_like(o)
        return lambda: torch.autograd.grad(function(*inputs), trained_inputs, do)

    lengths = torch.full((batch,), seq_len, device=device)
    pairs = (k_cmp, v_cmp, k, v, k, v)
    selected = partial(selected_attention, spec=SPEC, backend="triton")
    window = partial(window_attention, window=SPEC.window, backend="triton")
    steps = {
        "compressed": trained(
            lambda q, k, v: compressed_attention(q, k, v, SPEC, backend="triton")[0],
            q,
            k_cmp,
            v_cmp,
        ),
        "select_blocks": lambda: blocks(q),
        "selected": trained(selected, q, k, v, blocks(q)),
        "selected local": trained(selected, local.requires_grad_(), k, v, blocks(local)),
        "window": trained(window, q, k, v),
        "nsa_attention": trained(
            partial(nsa_attention, spec=SPEC, backend="triton"), q, *pairs, gates.requires_grad_()
        ),
    }
    last, last_gates = q[:, -1].detach(), gates[:, -1].detach()
    blocks_kv, all_kv = (k_cmp.detach(), v_cmp.detach()), (k.detach(), v.detach())
    steps["decode"] = lambda: decode_attention(
        last, *blocks_kv, *all_kv, *all_kv, last_gates, lengths, SPEC, backend="triton"
    )
    return {f"{name} {'x'.join(map(str, shape))} {seq_len}": x for name, x in steps.items()}


def discover(steps: Mapping[str, Step]) -> dict[str, TunedOperation]:
    """Run each call once and collect the operations that it launches."""
    operations: dict[str, TunedOperation] = {}

    def collect(label: str, name: str, options: list[Any]) -> Any:
        operations.setdefault(name, TunedOperation(options, {})).steps[label] = steps[label]
        return options[0]

    for label, step in steps.items():
        with override_choices(partial(collect, label)):
            step()
    return operations


def fastest(
    name: str, operation: TunedOperation, time: Time
) -> tuple[Option | None, dict[str, float]]:
    """Return the fastest candidate, if one runs, and the milliseconds of each; inf if it fails."""
    options, times = {str(option): option for option in operation.options}, dict[str, float]()
    for label, option in options.items():
        try:
            times[label] = time(_relaunching(name, option, operation))
        except Exception:  # such as a tile that exceeds this GPU's shared memory
            times[label] = math.inf
    best = min(times, key=times.__getitem__)
    return (options[best] if times[best] < math.inf else None), times


def _relaunching(name: str, option: Option, operation: TunedOperation) -> Step:
    """Run the operation's calls once with `option`, then only the launches that take it.

    A call of another library has no launches to repeat, so it always runs as a whole.
    """
    # A new tuple, whose identity tells its launches from launches with equal tile sizes.
    option = Config(*option) if isinstance(option, Config) else option
    launches: list[Launch] = []

    def choice(operation_name: str, options: list[Any]) -> Any:
        return option if operation_name == name else options[0]

    def step() -> None:
        for x in launches:
            launch(x.kernel, x.grid, x.config, **x.arguments, **x.constants)
        if launches:
            return
        with override_choices(choice), recording(dry=False) as recorded:
            for call in operation.steps.values():
                call()
        launches.extend(x for x in recorded if x.config is option)

    return step


if __name__ == "__main__":
    for line in tune_device([parse_heads(text) for text in sys.argv[1:] or [M7C]]):
        print(line, flush=True)
