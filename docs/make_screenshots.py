"""Screenshots of TensorBoard for the docs, taken in a real browser from finished runs.

    python docs/make_screenshots.py RUNS      writes docs/img/tensorboard_<page>.png

RUNS is a folder of runs, as for `tensorboard --logdir`. Needs Chromium (Debian, Ubuntu: apt install
chromium) and Playwright (the extra `docs`). Waits until each page shows the texts of its View;
exits with code 1 if one does not appear.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page, TimeoutError, sync_playwright

TIMEOUT_MS = 60_000  # until a page shows a text
IMAGES = Path(__file__).with_name("img")


@dataclass(frozen=True)
class View:
    """A page of TensorBoard, the element to click there, and the texts that it must then show."""

    name: str
    path: str  # query and fragment of its URL
    texts: tuple[str, ...]
    height: int
    width: int = 1400
    click: str | None = None


CURVES = "?smoothing=0&tagFilter={}#timeseries"
SETTINGS_PANE = "[aria-label='Toggle settings side pane']"  # a click closes it
VIEWS = (
    View(
        "scalars",
        CURVES.format(quote("train/loss|bits_per_byte|^gates/(cmp|sel|win)$|tokens_per_s")),
        ("eval/bits_per_byte", "gates/cmp", "gates/sel", "gates/win", "speed/tokens_per_s"),
        1000,
        click=SETTINGS_PANE,
    ),
    View(
        "selection",
        CURVES.format(quote("selection/layer0[03]/(entropy|overlap|distance)")),
        tuple(f"selection/layer00/{metric}" for metric in ("entropy", "overlap", "distance")),
        1000,
        click=SETTINGS_PANE,
    ),
)


def main() -> int:
    """Take all screenshots; exit with code 1 if a page lacks a text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder of runs")
    parser.add_argument("--out", type=Path, default=IMAGES, help="default: docs/img")
    flags = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        parser.error("chromium not found; install it (Debian, Ubuntu: apt install chromium)")
    with tensorboard(flags.runs) as server, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for view in VIEWS:
            page = chromium.new_page(viewport={"width": view.width, "height": view.height})
            take(page, f"{server}{view.path}", view, flags.out / f"tensorboard_{view.name}.png")
            page.close()
        chromium.close()
    return 0


@contextlib.contextmanager
def tensorboard(runs: Path) -> Iterator[str]:
    """Start TensorBoard on a free port; yield its URL."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr or ():
            if url := re.search(r"at (http://\S+)", line):
                yield url[1]
                return
        raise SystemExit(f"tensorboard --logdir {runs} did not start")
    finally:
        process.terminate()
        process.wait()


def take(page: Page, url: str, view: View, to: Path) -> None:
    """Wait until the page shows the view's texts, then save a screenshot."""
    page.goto(url)
    if view.click is not None:
        page.locator(view.click).click()
    for text in view.texts:
        try:
            page.get_by_text(text).filter(visible=True).first.wait_for(timeout=TIMEOUT_MS)
        except TimeoutError:
            raise SystemExit(f"{view.name}: {url} does not show {text!r}") from None
    page.wait_for_timeout(3_000)  # curves appear after their titles
    page.screenshot(path=to)
    print(f"{to}: {to.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
