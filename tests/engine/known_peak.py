"""The recipe M7C on a device whose peak is known, so that metrics.csv has an MFU."""

import runpy

from nsa.engine import trainer
from tests.ranks import ROOT

PEAK = 1e12

if __name__ == "__main__":
    trainer.peak_flops = lambda gpu, precision: PEAK
    runpy.run_path(str(ROOT / "recipes/m7c.py"), run_name="__main__")
