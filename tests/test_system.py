"""Calls with a time limit, programs' output, files that may be missing or installed; tables."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from nsa import system
from nsa.text import align, as_one_line, first_line, markdown_table, type_and_message
from nsa.untrusted import text_or_empty
from tests.ranks import ROOT


def test_output_is_empty_if_a_program_fails_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.output_of("printf", r"out\377") == "out\N{REPLACEMENT CHARACTER}"
    assert system.output_of("sh", "-c", "echo out; exit 1") == ""
    assert system.output_of("no-such-program") == ""
    monkeypatch.setattr("nsa.system._TIMEOUT_SECONDS", 0.1)
    hanging = "import time; print('out', flush=True); time.sleep(60)"
    assert system.output_of(sys.executable, "-c", hanging) == ""


def test_a_file_that_cannot_be_read_is_empty_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\xff")
    assert text_or_empty(tmp_path / "file") == "a\N{REPLACEMENT CHARACTER}"
    assert text_or_empty(tmp_path / "none") == text_or_empty(tmp_path) == ""


def test_work_returns_its_result_or_error_and_a_block_ends() -> None:
    assert system.with_timeout(60, lambda: 3) == 3
    for error in (ValueError("of the work"), TimeoutError("of the work")):
        with pytest.raises(type(error), match=r"^of the work$"):
            system.with_timeout(60, mock.Mock(side_effect=error))
    with pytest.raises(SystemExit):
        system.in_background(sys.exit).result(60)
    assert system.in_background(threading.current_thread).result(60).daemon, "no exit waits for it"
    block = threading.Event()
    with pytest.raises(TimeoutError, match=r"no response within 0\.01 seconds"):
        system.with_timeout(0.01, block.wait)
    block.set()


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "open(0).read()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert system.is_alive(process)
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its exit code stays unread
        assert process.status() == psutil.STATUS_ZOMBIE
        assert not system.is_alive(process)
    assert not system.is_alive(process)


def test_a_child_imports_what_its_parent_does_and_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "lib", str(ROOT)])
    environment = system.isolated_environment()
    assert environment["PYTHONPATH"].split(os.pathsep) == [f"{tmp_path}/lib", str(ROOT)]
    assert environment["PYTHONSAFEPATH"] == "1"


def test_a_missing_package_has_no_version() -> None:
    assert system.package_version("psutil") == psutil.__version__
    assert system.package_version("no-such-package") is None


def test_an_address_is_reached_by_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by one whose address begins alike."""
    real = psutil.net_if_addrs()
    own = {
        entry.address: name
        for name, entries in real.items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }
    decoys = [SimpleNamespace(address=f"{address}1") for address in own]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"decoy": decoys} | real)
    assert {address: system.interface_towards(address) for address in own} == own
    assert [system.interface_towards(address) for address in system.LOOPBACK] == [None, None, None]


def test_a_tables_columns_are_aligned_and_its_cells_harmless() -> None:
    assert align([["name", "n", "text"], ["a", "100", "b"]]) == ["name    n  text", "a     100  b"]
    assert "\x1b" not in align([["\x1b[31m", "x"]])[0]


def test_no_cell_of_a_markdown_table_ends_it_or_holds_html_or_a_link() -> None:
    lines = markdown_table(("a|b", "c"), [("x | y\nz", "<b>[1](http://d) www.e")])
    assert lines[:2] == ["| a/b | c |", "| --- | --- |"]
    assert lines[2:] == ["| x / y z | &lt;b>\\[1\\](http:&#47;/d) www&#46;e |"]


def test_an_error_is_one_line() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert type_and_message(ValueError("\n one\ntwo")) == "ValueError: one two"
    assert type_and_message(AssertionError()) == "AssertionError"
    fix = "check the disk, or use another file"
    assert str(as_one_line(OSError(5, "I/O error", "a\n"))) == rf"a\n: I/O error; {fix}"
    assert str(as_one_line(OSError("closed"))) == f"closed; {fix}"


@pytest.mark.parametrize(("limit", "limited"), [("1000000\n", True), ("max\n", False), ("", False)])
def test_a_containers_memory_is_that_of_its_limit(
    limit: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"/sys/fs/cgroup/memory.max": limit}
    monkeypatch.setattr("nsa.untrusted.text_or_empty", files.__getitem__)
    assert (system.available_memory() == 10**6) == limited
    monkeypatch.setattr("nsa.untrusted.text_or_empty", lambda path: f"{2**60}\n")
    assert 10**6 < system.available_memory() <= psutil.virtual_memory().total


def test_a_flag_names_the_installed_file_unless_there_is_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "ds_configs/zero1_pcie.json"
    for shipped in (name, "recipes/m7c.py"):
        assert system.existing_or_resource(shipped) == ROOT / shipped
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / name).write_text("{}")
    assert system.existing_or_resource(name) == Path(name)
    assert system.existing_or_resource("none.json") == Path("none.json")
