"""`nsa generate … > PATH`, where PATH is a file, a pipe or a terminal."""

from __future__ import annotations

import os
import sys

from nsa.cli import main

stdout = os.open(sys.argv[1], os.O_WRONLY | os.O_NOCTTY)
os.dup2(stdout, 1)
os.close(stdout)
sys.exit(main(sys.argv[2:]))
