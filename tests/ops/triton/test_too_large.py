"""A tile that this GPU cannot launch: the next candidate runs, or one clear error says what to do.

The GPU's refusal is planted where a kernel is called; all else runs in Triton's interpreter.
"""

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from nsa.ops.triton import band, configs
from nsa.ops.triton.configs import Config, Tile, candidates, choose_config
from nsa.spec import NSASpec
from tests.ops.cases import Case
from tests.ops.triton.parity import DENSE, assert_parity, inputs, settings

CASE = Case(NSASpec(4, 2, 5, 2, 0, 1, 7), (45,), kv_heads=2, group=3, value_dim=4)
FIRST, SECOND = candidates("window_forward", (16, 16), torch.float32)
LIMIT = OutOfResources(107_520, 101_376, "shared memory")
REFUSALS = [LIMIT, PTXASError("spills\nmore lines"), CompilationError(None, None, "no layout")]
Refuse = Callable[[Exception, Callable[[str, int], bool]], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuse]:
    """Let calls of kernels raise, by the kernel's name and its warps."""
    kind: Any = type(band.band_forward_kernel)
    get = kind.__getitem__

    def plant(error: Exception, refused: Callable[[str, int], bool]) -> None:
        def called(kernel: Any, grid: Any) -> Any:
            def run(*values: Any, **options: Any) -> Any:
                if refused(kernel.fn.__name__, options["num_warps"]):
                    raise error
                return get(kernel, grid)(*values, **options)

            return run

        monkeypatch.setattr(kind, "__getitem__", called)

    configs._first_that_runs.cache_clear()
    monkeypatch.setattr(configs, "_too_large", {})
    yield plant
    configs._first_that_runs.cache_clear()


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_the_next_candidate_runs_and_stays(error: Exception, refuse: Refuse) -> None:
    calls = []

    def refused(kernel: str, warps: int) -> bool:
        calls.append((kernel, warps))
        return kernel == "band_forward_kernel" and warps == FIRST.warps

    refuse(error, refused)
    with pytest.warns(
        UserWarning, match=rf"band_forward_kernel: tile {FIRST} does not run on"
    ) as w:
        assert_parity(CASE, "window")
    assert f"taking {SECOND}" in str(w[0].message)
    assert len([x for x in w if "does not run" in str(x.message)]) == 1
    assert calls.count(("band_forward_kernel", FIRST.warps)) == 1
    like = inputs(CASE).q
    assert choose_config("window_forward", (16, 16), like) == SECOND
    assert choose_config("compressed_forward", (16, 16), like) == FIRST


def test_several_kernels_of_one_operation_take_their_next_candidates(refuse: Refuse) -> None:
    forward = "band_forward_kernel", "selected_forward_kernel"
    refuse(LIMIT, lambda kernel, warps: kernel in forward and warps == FIRST.warps)
    with settings(**DENSE), pytest.warns(UserWarning, match="does not run on") as caught:
        assert_parity(CASE, "mixed")
    assert {str(x.message).partition(":")[0] for x in caught} >= {*forward}


PTXAS = """Internal Triton PTX codegen error
`ptxas` stderr:
ptxas info    : (C7511) wgmma serialized
ptxas fatal   : (C7600) Register allocation failed
Repro command: ptxas -v /tmp/x.ptx
"""


def in_a_called_function(cause: Exception | None, message: str | None = None) -> CompilationError:
    """As Triton wraps an error where a kernel calls a function: source code and a caret."""
    source = "def kernel(q):\n    x = tl.zeros([100])\n    return x"
    error = CompilationError(source, ast.parse(source).body[0].body[0], message)
    error.__cause__ = cause
    return error


INNERMOST = in_a_called_function(None, "Shape element 0 must be a power of 2\nmore lines")
CAUSES = {
    "shared memory, Required: 107520": LIMIT,
    "ptxas fatal   : (C7600) Register allocation failed": PTXASError(PTXAS),
    "Shape element 0 must be a power of 2": in_a_called_function(in_a_called_function(INNERMOST)),
    "no layout": in_a_called_function(RuntimeError("no layout")),
    "x = tl.zeros([100])": in_a_called_function(None),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_warning_shows_the_cause(cause: str, refuse: Refuse) -> None:
    refuse(CAUSES[cause], lambda *call: call == ("band_forward_kernel", FIRST.warps))
    with pytest.warns(UserWarning, match=r"does not run on this GPU \(.*\); taking") as caught:
        assert_parity(CASE, "window")
    message = str(caught[0].message)
    assert cause in message
    assert "^" not in message
    assert "\n" not in message


def test_without_a_candidate_left_the_error_names_the_way_out(refuse: Refuse) -> None:
    refuse(LIMIT, lambda kernel, _: kernel == "band_keys_kernel")
    with pytest.raises(ValueError, match="band_keys_kernel: none of its tile sizes runs") as error:
        assert_parity(CASE, "window")
    assert "Required: 107520, Hardware limit: 101376" in str(error.value)
    assert "set model.attention.backend=blockwise" in str(error.value)


def test_other_errors_are_not_taken_for_a_tile_that_is_too_large(refuse: Refuse) -> None:
    refuse(RuntimeError("a bug"), lambda *_: True)
    with pytest.raises(RuntimeError, match="a bug"):
        assert_parity(CASE, "window")
    assert configs._too_large == {}


def test_a_tile_that_no_operation_chose_is_not_replaced() -> None:
    """As when all candidates are measured, refusals too."""
    assert not configs.exclude(Config(16, 16, 4, 1), "band_forward_kernel", "too large")
    assert Tile(*FIRST) == FIRST
