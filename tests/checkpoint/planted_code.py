"""Plant code in a checkpoint: it runs when a file is unpickled, and all hashes are right."""

from pathlib import Path
from typing import Any

import torch

from nsa.checkpoint.commit import MANIFEST, manifest_text, read_manifest, sync_and_hash

KINDS = {"model": "*model_states.pt", "optimizer": "*optim_states.pt", "rng": "rng_rank*.pt"}


class Code:
    """Creates the file `path` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def plant(checkpoint: Path, kind: str, ran: Path) -> int:
    """Add code that creates `ran` to all files of a kind, and hash them; return their number."""
    files = sorted(checkpoint.glob(KINDS[kind]))
    for file in files:
        content = torch.load(file, weights_only=False)
        torch.save(content | {"planted": Code(ran)}, file)
    rehash(checkpoint)
    return len(files)


def rehash(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    files = {name: sync_and_hash(checkpoint / name) for name in manifest["files"]}
    (checkpoint / MANIFEST).write_text(manifest_text({**manifest, "files": files}))
