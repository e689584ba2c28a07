"""Generator of docs/reference/settings.md: every setting, its default and its field's comment.

python docs/make_settings.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path

import yaml

from nsa.engine.config import RunConfig

PAGE = Path(__file__).with_name("reference") / "settings.md"
HEAD = """# Settings

```bash
deepspeed --num_gpus 2 recipes/m7c.py --set train.learning_rate=3e-4 --set model.layers=6
```

The tree of `config.yaml` in a run's folder, which `--config` reads and `--set section.name=value`
changes ([how a value travels](../design/architecture.md#the-path-of-a-value)). `attention` is short
for `model.attention`. Defaults are the library's; a recipe's profile changes some. Generated from
the dataclasses by `docs/make_settings.py`.
"""


def page() -> str:
    """Return the page."""
    sections = "".join(
        f"\n## {name}\n\n| setting | default | |\n| --- | --- | --- |\n" + "".join(rows(cls))
        for name, cls in tables("", RunConfig)
        if name
    )
    return HEAD + sections


def tables(prefix: str, cls: type) -> Iterator[tuple[str, type]]:
    """Yield each dataclass of the tree with its dotted name, parents first."""
    yield prefix, cls
    for field in fields(cls):
        if is_dataclass(kind := type(default(field))):
            yield from tables(f"{prefix}.{field.name}".lstrip("."), kind)


def rows(cls: type) -> Iterator[str]:
    """Yield a row per setting of one dataclass."""
    comments = field_comments(cls)
    for field in fields(cls):
        value = default(field)
        if not is_dataclass(type(value)):
            shown = yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
            yield f"| `{field.name}` | `{shown}` | {comments[field.name]} |\n"


def default(field: Field) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def field_comments(cls: type) -> dict[str, str]:
    """Return each field's comment, from its line or the lines above."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        text = line.strip()
        if text.startswith("# "):
            above.append(text.removeprefix("# "))
            continue
        if match := re.match(r"(\w+): .*?(?:  # (.*))?$", text):
            comments[match[1]] = (match[2] or " ".join(above)).replace("|", "\\|")
        above = []
    return comments


if __name__ == "__main__":
    PAGE.write_text(page())
