"""Which streaming cache runs: ``blocks`` compiled, where that was done, else as it is.

Owns that choice, which is made once in a process. ``make compiled`` leaves ``blocks_compiled``
beside ``blocks``: the very same source, compiled, and the digest of what it was made of. One that
was made of anything else is not used, so that what runs is always what can be read here.
"""

import hashlib
import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

from tierlog_reader.cache import blocks

__all__ = ["COMPILED", "Compiled", "StreamingCache", "compiled_blocks", "source_digest"]

MODULE: Final = "tierlog_reader.cache.blocks_compiled"
SOURCES: Final = ("blocks.py", "blocks.pxd", "layout.py")
REMEDY: Final = "run `make compiled`"


class Compiled(NamedTuple):
    """The compiled module, or why there is none."""

    module: ModuleType | None
    why_not: str


def source_digest() -> str:
    """Name what the compiled module has to be made of."""
    total = hashlib.sha256()
    for name in SOURCES:
        total.update(Path(__file__).with_name(name).read_bytes())
    return total.hexdigest()


def compiled_blocks() -> Compiled:
    """Find the compiled module, and see whether it is that of these sources."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        return Compiled(None, f"the streaming cache is not compiled ({error}): {REMEDY}")
    if getattr(module, "MADE_OF", "") != source_digest():
        return Compiled(None, f"the streaming cache was compiled of another source: {REMEDY}")
    return Compiled(module, "")


_chosen = compiled_blocks()
COMPILED: Final = _chosen.module is not None
"""Whether the compiled one runs."""

if TYPE_CHECKING:
    from tierlog_reader.cache.blocks import StreamingCache
else:
    StreamingCache = (_chosen.module or blocks).StreamingCache
