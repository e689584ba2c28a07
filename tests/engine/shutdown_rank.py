"""A rank that takes "steps" and waits for data in between, as the training loop does."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from nsa.engine import shutdown
from nsa.engine.peer_hosts import RankProcess
from nsa.engine.shutdown import Interrupted, ShutdownMonitor

shutdown.PEER_LOSS_GRACE_SECONDS = 0.5


def main(limit: str, peer: str, waits: str) -> None:
    monitor = ShutdownMonitor(float(limit) or None)
    monitor.start()
    if int(peer):
        monitor.watch([RankProcess("", 0), RankProcess(os.uname().nodename, int(peer))], {})
    if waits != "data":
        print("ready", flush=True)
    begun = time.monotonic()
    while monitor.reason is None and time.monotonic() < begun + 60:
        if waits == "data":
            try:
                with monitor.interruptible():
                    print("ready", flush=True)  # a signal before this would find nobody waiting
                    time.sleep(60)
            except Interrupted:
                print("interrupted", flush=True)
        elif waits == "collective":
            ctypes.CDLL(None).pause()
        else:
            time.sleep(0.05)
    print(monitor.reason, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
