"""Builds the site from the repository's own tree, so that links work as on GitHub."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "ds_configs/README.md")  # pages outside docs/


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages of docs/ below docs/, plus those outside; the first is the index."""
    ours = [file for file in files if file.src_dir == config.docs_dir]
    for file in ours:
        files.remove(file)
    for path in (*OUTSIDE, *(f"docs/{file.src_uri}" for file in ours)):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
