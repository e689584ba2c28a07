"""`python -m nsa <verb>`, the same as `nsa <verb>`."""

from __future__ import annotations

import sys

from nsa.cli import main

sys.exit(main())
