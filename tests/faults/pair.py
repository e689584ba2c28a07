"""Starts a program on two ranks, as DeepSpeed's launcher does, and returns their exit code.

python pair.py PROGRAM ARGUMENT ...
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.ranks import free_port


def main() -> int:
    common = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[1:]],
            env=os.environ | common | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.05)
    for rank in ranks:
        rank.terminate()  # peers of one that failed
        rank.wait()
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
