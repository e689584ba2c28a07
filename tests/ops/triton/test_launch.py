"""Kernel launches: which binary runs, on which device, and which numbers do not compile again."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.ops import nsa_attention
from nsa.ops.triton import launch as launcher
from nsa.ops.triton.configs import Config
from nsa.spec import NSASpec
from tests.compile.launches import launch_both_passes
from tests.inputs import Inputs
from tests.kernel_launches import Launch, recording
from tests.ops import fused
from tests.ops.cases import Case
from tests.ops.fused import LAYOUTS, Documents, Operation
from tests.ops.test_fused import recorded

ANY = Config(1, 1, 4, 1)


@pytest.mark.parametrize(("rocm", "binaries"), [("7.0", 2), (None, 1)])
def test_calls_share_a_binary_only_if_triton_would_compile_the_same(
    rocm: str | None, binaries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's compiler takes 32-bit offsets into tensors of less than 2 GB; loads of 16 bytes are
    aligned."""
    compiled: list[Any] = []

    def compile_and_run(*_: Any) -> Any:
        compiled.append(None)
        return {(1, 1, 1): lambda *values: None}

    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(launcher, "_compile_and_run", compile_and_run)
    monkeypatch.setattr(launcher, "_compiled", {})
    kernel: Any = SimpleNamespace(fn=object())
    for size in (2**31 - 1, 2**31, 64, 2**32):
        x = torch.empty(size, dtype=torch.int8, device="meta")
        launcher._run(kernel, (1,), (x,), 1, ANY)
    assert len(compiled) == binaries
    compiled.clear()
    aligned = torch.empty(64, dtype=torch.int8)
    for x in (aligned, aligned[16:], aligned[1:], aligned[2:]):
        launcher._run(kernel, (1,), (x,), 1, ANY)
    assert len(compiled) == 2
    compiled.clear()
    first = kernel, aligned, 5, True, ANY
    others = SimpleNamespace(fn=object()), aligned.to("meta"), 6, None, Config(1, 1, 8, 1)
    calls = [first] + [(*first[:i], other, *first[i + 1 :]) for i, other in enumerate(others)]
    monkeypatch.setattr(launcher, "MAX_COMPILED", 99)
    for called, x, count, constant, config in calls * 2:
        launcher._run(called, (1,), (x, count, constant), 2, config)
    assert len(compiled) == 1 + len(others)
    monkeypatch.setattr(launcher, "MAX_COMPILED", 3)
    launcher._run(kernel, (1,), (aligned, 7), 2, ANY)
    assert len(launcher._compiled) <= 3


def test_a_kernel_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current, ran = [0], []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launcher, "_run", lambda *_: ran.append(current[-1]))
    for index in (0, 1):
        x = SimpleNamespace(device=torch.device("cuda", index))
        launcher.launch(SimpleNamespace(fn=lambda x, y: None), (1,), ANY, x=x, y=2)
    assert ran == [0, 1]


def attention(*lengths: int) -> list[Launch]:
    """Launches of both passes over documents of these lengths, on `meta` tensors."""
    case = Case(NSASpec(), lengths, kv_heads=1, key_dim=64, value_dim=64)
    x = [y.to("meta").requires_grad_() for y in Inputs.of(case, torch.bfloat16).tensors()]
    options = {"cu_seqlens": case.offsets_on(torch.device("meta")), "backend": "triton"}
    with recording() as launches:
        launch_both_passes(lambda: nsa_attention(*x, case.spec, **options))
    return launches


def test_partial_gradients_of_half_precision_are_in_float32() -> None:
    """Of keys that several programs share, and the row sums of all three branches."""
    tensors = {name: x for launch in attention(1_100) for name, x in launch.arguments.items()}
    for name in ("dk_cmp", "dv_cmp", "dk_part", "dv_part", "lse2", "delta"):
        assert tensors[name].dtype == torch.float32, name
    assert tensors["dk_win"].dtype == tensors["dq"].dtype == torch.bfloat16


def of_tokens(count: int) -> list[Operation]:
    return [
        fused.swiglu((count, 8), 3),
        fused.norm((count, 6)),
        fused.rotary(LAYOUTS["all branches"], Documents((count, 9))),
        fused.pool(Documents((count, 9)), 2, 6, True),
        fused.selector(Case(NSASpec(4, 2, 4, 3, 1, 1, 5), (count, 9), kv_heads=1), 1),
    ]


def test_sizes_of_another_batch_do_not_compile_a_kernel_again() -> None:
    """Triton compiles again for a number that is 1 or a multiple of 16, unless it is excluded."""
    pairs = [*zip(attention(600, 500), attention(700, 60, 80), strict=True)]
    for batches in zip(of_tokens(70), of_tokens(167), strict=True):
        pairs += zip(*map(recorded, batches), strict=True)
    assert len({first.kernel.fn.__name__ for first, _ in pairs}) > 15
    for first, other in pairs:
        kernel = first.kernel
        options = getattr(kernel, "kwargs", None) or vars(kernel)  # the interpreter's, or Triton's
        for name, value in first.arguments.items():
            if isinstance(value, int) and value != other.arguments[name]:
                assert name in options["do_not_specialize"], f"{kernel.fn.__name__}: {name}"


def test_parts_of_key_gradients_are_few_in_long_sequences_and_none_in_short_ones() -> None:
    """One for each 512 queries would make them grow with the square of the length."""
    parts = {}
    for length in (300, 20_000):
        tensors = {name: x for launch in attention(length) for name, x in launch.arguments.items()}
        parts[length] = tensors["dk_cmp"].shape[0], tensors["dk_part"].shape[1]
    assert parts[300] == (1, 1)
    assert parts[20_000][0] == 16
    assert parts[20_000][1] > 20_000
