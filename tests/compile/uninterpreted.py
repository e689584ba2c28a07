"""Tests of the compile check on toy kernels and on real ones; test_compile.py runs this file.

In a process of its own, because the other tests' process has imported Triton as an interpreter.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import nsa.ops.triton
from nsa.ops.inputs import GatedInputs
from nsa.ops.triton.band import triton_gated
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import launch
from nsa.spec import NSASpec
from tests.bench.__main__ import main as bench
from tests.compile import check, launches, toys
from tests.compile.check import CHIPS, MAX_SPILLED_FIRST, Variant
from tests.compile.launches import OPERATIONS, SUBSET, Case, record_launches
from tests.kernel_launches import Launch, recording

CASE = Case("toy", 1, 1, 64, 64, 1000, "bf16", False)
Rows = list[dict[str, Any]]


def checked(
    *starts: Callable[[], None], case: Case = CASE, chips: tuple[str, ...] = ("sm_80",)
) -> tuple[Rows, list[str]]:
    """Return the compile check's rows and failures for these launches."""
    with recording() as recorded:
        for start in starts:
            start()
    return check.check([(case, one, chip) for one in recorded for chip in chips])


def test_a_kernel_within_every_limit_passes_on_every_chip_and_is_compiled_once() -> None:
    plain = partial(toys.attention, Config(64, 64, 4, 2))
    rows, failures = checked(plain, plain, chips=tuple(CHIPS))
    assert failures == []
    assert [row["chip"] for row in rows] == list(CHIPS)
    for row in rows:
        assert row["products"] == 2
        assert row["tensor_core"] > 0
        assert row["registers"] > 32
        assert row["shared"] >= 64 * 64 * 2


def thirty_two_warps() -> None:
    """1,024 threads of NVIDIA's chips and 2,048 of AMD's."""
    arguments = toys.every_kind_of_argument("meta")
    launch(toys.take_all, (1,), Config(1, 1, 32, 1), **arguments, WIDTH=32)


CROWDED = partial(toys.attention, Config(64, 64, 1, 1))
PLAIN = partial(toys.attention, Config(16, 32, 4, 1), torch.float32, precision="ieee")
NOT_A_POWER_OF_2 = partial(toys.attention, Config(64, 48, 4, 1))


@pytest.mark.parametrize(
    ("start", "chips", "failures"),
    [
        (toys.too_deep, "sm_80", "16/128/4/4 sm_80: .* shared memory a block, limit 166,912"),
        (CROWDED, "sm_80", "64/64/1/1 sm_80: .* bytes spilled a thread, limit"),
        (PLAIN, "sm_80", "2 matrix products without tensor cores, limit 0.*no tensor-core"),
        (NOT_A_POWER_OF_2, "sm_80", "64/48/4/1 sm_80: does not compile.* power of 2"),
        (thirty_two_warps, "sm_80 gfx942", "gfx942: 2,048 threads a block, limit 1,024"),
        # By ptxas' warning C7510, of which Triton shows nothing; only Hopper's are asynchronous.
        (toys.serialised, "sm_80 sm_90", "sm_90: 1 warnings of serialised products, limit 0"),
    ],
    ids=["deep", "crowded", "plain products", "not a power of two", "threads", "serialised"],
)
def test_a_failure_names_kernel_case_config_chip_figure_and_limit(
    start: Callable[[], None], chips: str, failures: str
) -> None:
    """It passes on chips whose limits it keeps, and the next kernel is checked all the same."""
    good = partial(toys.attention, Config(64, 64, 4, 2))
    rows, errors = checked(start, good, chips=(*chips.split(),))
    assert re.search(failures, " ".join(errors)), errors
    assert re.match(r"\w+ toy 1/1 heads 64 bf16 T=1000 \d", errors[0]), errors
    failing = [number for number, row in enumerate(rows) if row["failures"]]
    assert (failing, len(rows)) == ([chips.count(" ")], 2 * len(chips.split()))


def test_every_kernel_compiles_within_the_limits_of_an_a100() -> None:
    """With M7C's shape where that launches it."""
    recorded: dict[str, tuple[Case, Launch, str]] = {}
    for case in launches.cases("first", OPERATIONS):
        for one in record_launches(case, 1):
            recorded.setdefault(one.kernel.fn.__name__, (case, one, "sm_80"))
    rows, failures = check.check(recorded.values(), max_spilled=MAX_SPILLED_FIRST)
    assert failures == []
    assert all(row["tensor_core"] for row in rows if row["products"])
    # Functions that kernels call have other names.
    library = [
        x.fn.__name__
        for module in pkgutil.iter_modules(nsa.ops.triton.__path__)
        for x in vars(importlib.import_module(f"nsa.ops.triton.{module.name}")).values()
        if isinstance(x, triton.JITFunction) and x.fn.__name__.endswith("_kernel")
    ]
    assert len(set(library)) > 5
    assert {row["kernel"] for row in rows} == set(library)


def test_another_number_of_documents_recompiles_nothing() -> None:
    """It would stall a run, each rank at another step."""
    case = Case("nsa_attention", *SUBSET[0], "bf16", True)
    variants = []
    for documents in (launches.DOCUMENTS, 1, 16, 37):
        with mock.patch.object(launches, "DOCUMENTS", documents):
            variants.append({repr(Variant.of(x, "sm_90")) for x in record_launches(case, 1)})
    assert len(variants[0]) > 5
    assert all(others <= variants[0] for others in variants)


def test_the_command_fails_if_a_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "toy", lambda case: toys.too_deep())
    with pytest.raises(SystemExit) as end:
        bench(["aot", "--operation", "toy", "--arch", "sm_80", "--jobs", "1"])
    assert end.value.code == 1


def test_a_launch_finds_the_checks_binaries_in_tritons_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So `meta` tensors compile what real ones do. And no other launch's."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    with recording() as recorded:
        arguments = toys.every_kind_of_argument("meta")
        launch(toys.take_all, (1,), Config(1, 1, 4, 2), **arguments, WIDTH=32)
    check.compile_variant(Variant.of(recorded[0], "sm_80"))
    hits: list[bool] = []
    listener = lambda **facts: hits.append(facts["cache_hit"])  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    with check.as_if_on("sm_80"):
        for width in (32, 16):
            arguments = toys.every_kind_of_argument("cpu")
            toys.take_all.warmup(**arguments, WIDTH=width, num_warps=4, num_stages=2, grid=(1,))
    assert hits == [True, False]


@check.as_if_on("sm_80")
def test_a_repeated_launch_runs_the_binary_that_triton_would_choose() -> None:
    """For every kind of argument: dtypes, alignment, integers that Triton compiles for, None.

    Each set of arguments comes twice. Only the start on a GPU is left out.
    """
    given = toys.every_kind_of_argument("cpu")
    x = given["x"]
    others = {"x": [x[1:], x[8:], x.half(), x.float()], "one": [2, 16, 2**40], "nothing": [x]}
    others |= {"sixteens": [1, 17], "scale": [0.25]}
    sets = [given, *({**given, name: y} for name, ys in others.items() for y in ys)]
    configs = Config(1, 1, 4, 2), Config(1, 1, 4, 2, maxnreg=64)
    ran: list[Any] = []  # binaries, by hash, with grid and arguments
    looked_up: list[None] = []

    def without_a_gpu(binary: CompiledKernel) -> None:
        binary._run = lambda *launched: ran.append(
            [
                binary.hash,
                *launched[:3],
                *(y.data_ptr() if isinstance(y, torch.Tensor) else y for y in launched[9:]),
            ]
        )

    def by_triton(arguments: dict[str, Any], config: Config) -> None:
        toys.take_all[(3, 2)](**arguments, WIDTH=32, **config.options())

    def by_launch(arguments: dict[str, Any], config: Config) -> None:
        launch(toys.take_all, (3, 2), config, **arguments, WIDTH=32)

    toys.take_all.pre_run_hooks.append(lambda *_, **__: looked_up.append(None))
    with mock.patch.object(CompiledKernel, "_init_handles", without_a_gpu):
        for run in (by_triton, by_launch):
            for config in configs:
                for arguments in [*sets, *sets]:
                    run(arguments, config)
    toys.take_all.pre_run_hooks.clear()
    half = len(ran) // 2
    assert ran[half:] == ran[:half]
    assert len({binary for binary, *_ in ran}) > 15
    assert len(looked_up) - half <= half / 2  # the second time without Triton


class Binary:
    """Stands in for a compiled kernel, and counts its launches."""

    launches = 0
    function = packed_metadata = None
    __getitem__ = CompiledKernel.__getitem__

    def _init_handles(self) -> None: ...

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None:
        Binary.launches += 1


@check.as_if_on("sm_80")
def test_a_layers_launches_take_few_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch, autograd, launchers and Triton's launch code: a fast GPU waits for them.

    Calls and not seconds, which other load on the machine changes; 1,937 a layer were slow.
    """
    spec, layers = NSASpec(), 4
    q, do = (torch.randn(1, 64, 12, 64, dtype=torch.bfloat16) for _ in range(2))
    pairs = [q.new_ones(1, n, 2, 64) for n in (*[spec.compressed_len(64)] * 2, *[64] * 4)]
    tensors = [x.requires_grad_() for x in (q, *pairs, q.new_ones(1, 64, 12, 3))]
    calls = 0

    def without_compiling(kernel: Any, key: str, signature: Any, device: int, *_: Any) -> Any:
        return kernel.device_caches[device][0].setdefault(key, Binary())

    def step() -> None:
        x = q
        for _ in range(layers):
            x = triton_gated(GatedInputs(x, *tensors[1:], None, spec, 0.125))[0]
        torch.autograd.grad(x, tensors, do)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    monkeypatch.setattr(JITFunction, "_do_compile", without_compiling)
    for _ in range(3):
        step()
    before = Binary.launches
    sys.setprofile(count)
    step()
    sys.setprofile(None)
    assert Binary.launches - before > 10 * layers
    assert calls < 410 * layers
