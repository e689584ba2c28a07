"""Process group: ranks of one machine meet on its loopback address; a port in use is one line."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.engine.runs import TINY, on_two_ranks
from tests.ranks import free_port, launch

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def test_ranks_of_one_machine_listen_on_the_loopback_address_only() -> None:
    listening = [line.split() for line in launch(Path(__file__).with_name("listening_ranks.py"))]
    assert listening[0], "rank 0 holds the store"
    for address in (address for rank in listening for address in rank):
        assert address.split(":")[0] in LOOPBACK, address


def test_a_port_in_use_is_one_line_that_names_the_fix(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        result = on_two_ranks(
            "m7c.py", *TINY, "--steps=1", "--run-dir=run", folder=tmp_path, port=port
        )
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("m7c: ")]
    assert errors == [
        f"m7c: --master_port {port}: already in use, maybe by another run; choose another port "
        "with deepspeed --master_port"
    ]
    assert list(tmp_path.iterdir()) == [], "no folder is left"
