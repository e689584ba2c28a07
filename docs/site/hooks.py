"""Gives the site the repository's own tree, so that links between pages work as on GitHub."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "ds_configs/README.md", "nsa/monitor/config.py")  # what pages link to


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of docs/ under docs/, and those that lie outside it; the first is the index."""
    ours = [file for file in files if file.src_dir == config.docs_dir]
    for file in ours:
        files.remove(file)
    for path in (*OUTSIDE, *(f"docs/{file.src_uri}" for file in ours)):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
