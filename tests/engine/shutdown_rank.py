"""A rank that takes "steps" and waits for data in between, as the training loop does."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from nsa.engine import shutdown
from nsa.engine.shutdown import Interrupted, ShutdownMonitor

shutdown.PEER_LOSS_GRACE_SECONDS = 0.5


def main(limit: str, neighbour: str, waits: str) -> None:
    told = ShutdownMonitor(float(limit) or None).install()
    if int(neighbour):
        told.watch_neighbours({1: (os.uname().nodename, int(neighbour))})
    if waits != "data":
        print("ready", flush=True)
    begun = time.monotonic()
    while told.reason is None and time.monotonic() < begun + 60:
        if waits == "data":
            try:
                with told.may_interrupt():
                    print("ready", flush=True)  # a signal before this would find nobody waiting
                    time.sleep(60)
            except Interrupted:
                print("interrupted", flush=True)
        elif waits == "collective":
            ctypes.CDLL(None).pause()
        else:
            time.sleep(0.05)
    print(told.reason, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
