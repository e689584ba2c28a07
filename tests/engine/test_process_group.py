"""Process group: where ranks meet and listen, what they share of a machine, what they exchange."""

import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from nsa.engine import process_group
from nsa.engine.process_group import (
    Ranks,
    end_process,
    private_folder,
    rendezvous_file,
    start_ranks,
)
from tests.ranks import free_port, launch, spawn_ranks

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("process_group")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def outputs(folder: Path, port: int) -> list[list[str]]:
    """The lines of process_group_ranks.py on each rank."""
    program, planted = Path(__file__).with_name("process_group_ranks.py"), folder / "planted"
    texts = launch(program, str(planted), port=port, timeout=120)
    return [text.splitlines() for text in texts]


def test_ranks_listen_on_the_loopback_address_only_and_share_the_cores(
    outputs: list[list[str]], port: int
) -> None:
    """At the master port a stranger could join."""
    cores = len(os.sched_getaffinity(0))
    for rank, (threads, listening, *_) in enumerate(outputs):
        assert int(threads) == max(1, cores // (1 + rank)), "of 1 and of 2 ranks on its machine"
        name, *sockets = listening.split()
        assert name == "listening:"
        assert sockets, "the ranks connect to each other"
        addresses, ports = zip(*(socket.split(":") for socket in sockets), strict=True)
        assert set(addresses) <= set(LOOPBACK)
        assert f"{port:04X}" not in ports


def test_ranks_exchange_values_and_run_no_pickle(outputs: list[list[str]], folder: Path) -> None:
    seen = ["passed", "sum: 1 None", "stop: SIGTERM on rank 1"]
    seen += ["raised: rank 1 got no batch", "crash: no batch; killed"]
    path = f"PosixPath('{'ä' * 50}')"
    seen.append(f"gathered: [Entry(path=None, size=0.5)] [Entry(path={path}, size=inf)]")
    seen += ["from rank 0: rank 0", "folder: runs/0 True"]
    (*before, refusal), second = (lines[2:] for lines in outputs)
    assert second == before == seen
    assert refusal.startswith("refused: rank 1 sent b'\\x80"), "the beginning of a pickle"
    assert "no rank of this run" in refusal
    assert not (folder / "planted").exists(), "rank 1 fails at rank 0's JSON, before its own pickle"


SCRIPT = """
import os
import deepspeed, torch
from nsa.engine import disable_shared_memory_op
from nsa.model import LanguageModel, ModelConfig

disable_shared_memory_op()
sizes = dict(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16)
model = LanguageModel(ModelConfig(vocab_size=31, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
ids = torch.arange(20)[None]
engine.backward(engine(ids[:, :-1], labels=ids[:, 1:]))
engine.step()
print("trained", flush=True)
os._exit(0)
"""


def test_a_users_script_does_not_wait_for_a_killed_build(tmp_path: Path) -> None:
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm/lock").touch()  # as a killed build of the operation leaves it
    (program := tmp_path / "script.py").write_text(SCRIPT)
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    process = spawn_ranks(program, ranks=1, environment=environment)
    try:
        (code,) = process.codes(60)
    finally:
        process.end()
    assert code == 0, process.text("err")
    assert "trained" in process.text("out")
    assert "deepspeed_shm_comm" not in process.text("err")


JOIN = """
import os, tempfile, time
from pathlib import Path
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
tempfile.tempdir = {0!r}
ready, leave = Path({0!r}, "ready"), os._exit
os._exit = lambda code: leave(code if ready.exists() else 9)
start_ranks(ranks := Ranks.from_environment())
time.sleep(ranks.rank / 2)
if ranks.rank == ranks.world_size - 1:
    ready.touch()
stop_ranks()
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def folder_in(tmp_path: Path) -> Path:
    return tmp_path / f"nsa-{os.getuid()}"


def test_each_launcher_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets the number of an ended launcher started at another time."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    launcher, start, port = rendezvous_file().name.split(".")
    assert (launcher, port) == (str(os.getppid()), "29500")
    other = 1 if os.getppid() > 1 else os.getpid()  # 1: the machine's first process
    monkeypatch.setattr(os, "getppid", lambda: other)
    assert rendezvous_file().name.split(".")[1] != start


@pytest.mark.parametrize("kind", ["open to a group", "open to others", "a link", "another user's"])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, kind: str) -> None:
    folder = folder_in(tmp_path)
    folder.mkdir(mode=0o700)
    if kind == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "another user's":
        if os.getuid():
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, 65534, 65534)
    else:
        folder.chmod(0o710 if kind == "open to a group" else 0o702)
    with pytest.raises(ValueError, match=r"only you can enter.*set TMPDIR"):
        private_folder()


@pytest.mark.parametrize("ranks", [2, 1])
def test_ranks_of_one_launcher_meet_at_a_file_and_leave_none(ranks: int, tmp_path: Path) -> None:
    """A rank alone meets no other. All leave once the last is ready."""
    (program := tmp_path / "join.py").write_text(JOIN.format(str(tmp_path)))
    started = spawn_ranks(program, ranks=ranks)
    assert started.codes(90) == [0] * ranks, started.text("err")
    assert folder_in(tmp_path).exists() == (ranks > 1)
    if ranks > 1:
        assert not os.listdir(folder_in(tmp_path))
        assert folder_in(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("world_size", "environment", "private"),
    [
        (2, {"CROSS_RANK": "0"}, True),
        (1, {}, True),
        (2, {}, False),  # of srun or mpirun, which may be a process per rank
        (2, {"CROSS_RANK": "0", "MASTER_ADDR": "node1"}, False),
        (2, {"CROSS_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, False),  # its ranks may join twice
    ],
)
def test_only_deepspeeds_launcher_on_one_machine_starts_ranks_that_meet_at_a_file(
    world_size: int, environment: dict[str, str], private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods: list[str | None] = []
    join = lambda *_, init_method, **__: methods.append(init_method)  # noqa: E731
    monkeypatch.setattr(process_group.deepspeed, "init_distributed", join)
    for name in ("CROSS_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"MASTER_ADDR": "127.0.0.1"} | environment).items():
        monkeypatch.setenv(name, value)
    process_group._join(Ranks(rank=0, local_rank=0, world_size=world_size), "gloo")
    assert methods == ["private://" if private else None]


def test_a_port_in_use_is_refused_with_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "EADDRINUSE, message: Address already in use"

    def refuse(*_: object, **__: object) -> None:
        raise dist.DistNetworkError(problem)

    monkeypatch.setattr(process_group.deepspeed, "init_distributed", refuse)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match=r"--master_port 29500: already in use.* --master_port"):
        process_group._join(Ranks(rank=0, local_rank=0, world_size=2), "gloo")
    problem = "no route to host"
    with pytest.raises(dist.DistNetworkError, match=problem):
        process_group._join(Ranks(rank=0, local_rank=0, world_size=2), "gloo")


def test_a_launcher_numbers_the_ranks_or_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    for name, number in zip(names, ("3", "1", "4"), strict=True):
        monkeypatch.setenv(name, number)
    assert Ranks.from_environment() == Ranks(rank=3, local_rank=1, world_size=4)
    for name in names:
        monkeypatch.delenv(name)
    assert Ranks.from_environment() == Ranks(rank=0, local_rank=0, world_size=1)


def test_ranks_connect_at_the_interface_towards_the_master_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "_join", lambda *_: None)
    monkeypatch.setattr(process_group, "interface_towards", {"node1": "eth0"}.get)
    given = {"MASTER_ADDR": "node1", "GLOO_SOCKET_IFNAME": "mine"}
    with patch.dict(os.environ, given):
        start_ranks(Ranks(rank=0, local_rank=0, world_size=1))
        assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth0", "without = it is a prefix"


def test_a_rank_that_lost_its_peer_lets_that_report_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[object] = []
    monkeypatch.setattr(process_group, "end_process", lambda code: events.append(code))
    monkeypatch.setattr(process_group.time, "sleep", lambda seconds: events.append("waits"))
    monkeypatch.setattr(signal, "signal", lambda number, _: events.append(number))
    closed = RuntimeError("[gloo/transport] closed")
    for error in (dist.DistNetworkError("x"), closed, ValueError()):
        process_group.crash(error)
    signals = [signal.SIGTERM, signal.SIGINT]  # end it again as they did before
    assert events == [*signals, "waits", 1, *signals, "waits", 1, *signals, 1]
    assert capsys.readouterr().err.count("Error") == 3


def test_a_rank_0_removes_its_file_and_writes_its_last_lines_as_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    (path := tmp_path / "file").touch()
    monkeypatch.setattr(process_group, "_rendezvous_files", [path])
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        print("finished")
        print("a warning", file=err)
        with pytest.raises(SystemExit, match="5"):
            end_process(5)
        assert [Path(file.name).read_text() for file in (out, err)] == ["finished\n", "a warning\n"]
    assert not path.exists()
