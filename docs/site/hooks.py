"""MkDocs hook: keep the repository's paths on the site, so that links work as on GitHub."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES_OUTSIDE_DOCS = ("README.md", "ds_configs/README.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put pages of docs/ below docs/, and add those outside; the first is the index."""
    docs = [file for file in files if file.src_dir == config.docs_dir]
    for file in docs:
        files.remove(file)
    for path in (*PAGES_OUTSIDE_DOCS, *(f"docs/{file.src_uri}" for file in docs)):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
