"""CpuCollectives: an error of one rank is raised on all, values arrive intact, no pickle runs."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import launch


def test_ranks_exchange_errors_and_values_and_run_no_pickle(tmp_path: Path) -> None:
    program, planted = Path(__file__).with_name("collectives_ranks.py"), tmp_path / "planted"
    seen = ["passed", "sum: 1 None", "stop: SIGTERM on rank 1"]
    seen += ["raised: rank 1 got no batch", "crash: no batch; killed"]
    path = f"PosixPath('{'ä' * 50}')"
    seen.append(f"gathered: [Entry(path=None, size=0.5)] [Entry(path={path}, size=inf)]")
    seen += ["from rank 0: rank 0", "folder: runs/0 True"]
    first, second = launch(program, str(planted), timeout=120)
    assert second.splitlines() == seen
    *before, refusal = first.splitlines()
    assert before == seen
    assert refusal.startswith("refused: rank 1 sent b'\\x80"), "the beginning of a pickle"
    assert "no rank of this run" in refusal
    assert not planted.exists(), "rank 1 fails at rank 0's JSON, before its own pickle"
