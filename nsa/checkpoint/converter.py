"""DeepSpeed's converter to universal checkpoints, which here reads files as data only.

python -m nsa.checkpoint.converter --input_folder CHECKPOINT --output_folder FOLDER
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from nsa.checkpoint.safe_load import data_only


def main() -> None:
    """Run the converter with this process's arguments."""
    checkpoint = Path(sys.argv[sys.argv.index("--input_folder") + 1])
    with data_only(checkpoint):
        runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
