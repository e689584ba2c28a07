"""DeepSpeed's converter to universal checkpoints, which here reads files as data only.

python -m nsa.checkpoint.converter --input_folder CHECKPOINT --output_folder FOLDER
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from nsa.checkpoint.safe_load import data_only


def main() -> None:
    """Run the converter with this process's arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--input_folder", type=Path, default=Path())
    flags, _ = parser.parse_known_args()  # the converter checks them
    with data_only(flags.input_folder):
        runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
