"""Names and numbers that several packages share, each declared once. Imports nothing heavy."""

from __future__ import annotations

BRANCHES = ("cmp", "sel", "win")  # compressed, selected, sliding window: the order of gates
IGNORE_INDEX = -100  # a label that the loss skips
SHORT_RUN = 100  # steps; a shorter run only tests the setup: it learns too little to be judged
INTERRUPTED = 130  # the exit code of Ctrl-C in a shell
