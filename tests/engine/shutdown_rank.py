"""A rank that alternates "steps" and waiting for data, as the training loop does."""

import ctypes
import os
import sys
import time

from nsa.engine import shutdown
from nsa.engine.shutdown import Interrupted, ShutdownMonitor

shutdown.PEER_LOSS_GRACE_SECONDS = 0.5


def main(time_limit: str, peer: str, waits_in: str) -> None:
    if waits_in == "the end":
        shutdown.PEER_LOSS_GRACE_SECONDS = 60
    monitor = ShutdownMonitor(float(time_limit) or None)
    host = os.uname().nodename
    peers = [(host if int(peer) > 0 else "another host", abs(int(peer)))] if int(peer) else []
    monitor.start([(host, os.getpid()), *peers])
    if waits_in != "data":
        print("ready", flush=True)
    if waits_in == "the end":
        time.sleep(2)  # in which it sees that the peer has ended
        monitor.stop_watching()
        return
    started = time.monotonic()
    while monitor.reason is None and time.monotonic() < started + 60:
        if waits_in == "data":
            try:
                with monitor.interruptible():
                    print("ready", flush=True)  # not earlier: a signal must find it waiting
                    time.sleep(60)
            except Interrupted:
                print("interrupted", flush=True)
        elif waits_in == "collective":
            ctypes.CDLL(None).pause()
        else:
            time.sleep(0.05)
    print(monitor.reason, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
