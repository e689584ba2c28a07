"""`nsa watch` with shorter time limits, where they are constants and not settings."""

from __future__ import annotations

import sys

from nsa.cli import main
from nsa.watchdog import disk, hang_detector, supervisor

disk.LIMIT_SECONDS = hang_detector.LIMIT_SECONDS = 1.0
hang_detector.CONFIRM_SECONDS = supervisor.STACKS_SECONDS = 0.5

sys.exit(main(["watch", *sys.argv[1:]]))
