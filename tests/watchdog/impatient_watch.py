"""`nsa watch` with shorter time limits, where they are constants and not settings."""

import sys

from nsa.cli import main
from nsa.watchdog import command, hang_detector, supervisor

supervisor.DISK_LIMIT_SECONDS = hang_detector.DISK_LIMIT_SECONDS = 1.0
hang_detector.CONFIRM_SECONDS = supervisor.STACKS_SECONDS = 0.5
supervisor.GRACE_SECONDS = 3.0
hang_detector.HEARTBEAT_SECONDS = 0.1
command.RESTART_SECONDS = 1.0

sys.exit(main(["watch", *sys.argv[1:]]))
