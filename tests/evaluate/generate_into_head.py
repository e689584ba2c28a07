"""`nsa generate … | head -c 20`, as a shell connects the two."""

from __future__ import annotations

import os
import subprocess
import sys

from nsa.cli import main

head = subprocess.Popen(["head", "-c", "20"], stdin=subprocess.PIPE)
assert head.stdin is not None
os.dup2(head.stdin.fileno(), 1)
head.stdin.close()
code = main(sys.argv[1:])
os.close(1)  # else head would wait for us
sys.exit(code or head.wait())
