"""Sources of the tests of the writer, in a module that its process can import fast."""

import os
import sys
from typing import Any

from nsa.data.dataset import DividedSource
from nsa.data.source import Documents, Source, SourceUnreachable


class Failing(Source):
    """A source that raises an error which no code handles; it prints, as libraries do."""

    def read(self, cursor: Any = None) -> Documents:
        print("a progress bar", flush=True)
        os.write(1, b"from C\n")
        raise KeyError("no such key")


class Unreachable(Source):
    """Prints what is imported before the first document, and is then out of reach."""

    def read(self, cursor: Any = None) -> Documents:
        print(*sorted(sys.modules), flush=True)
        raise SourceUnreachable("no hub")


class Fails(DividedSource):
    documents = Failing()


class Unreached(DividedSource):
    documents = Unreachable()
