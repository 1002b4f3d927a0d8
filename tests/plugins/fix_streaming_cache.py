"""The streaming cache in both of its ways: as plain Python, and compiled where that was done."""

import pytest

from tierlog_reader.cache import blocks
from tierlog_reader.cache.store import compiled_blocks
from tools.compile_cache import missing


@pytest.fixture(scope="module")
def plain_cache():
    """Give the class as it is: its words can be watched, which C's can't."""
    return blocks.StreamingCache


@pytest.fixture(scope="module")
def compiled_cache():
    """Give the compiled class, where there is one."""
    found = compiled_blocks()
    if found.module is None:
        lacking = missing()
        pytest.skip(found.why_not if lacking is None else f"it can't be compiled: {lacking}")
    return found.module.StreamingCache


@pytest.fixture(scope="module", params=["plain", "compiled"])
def streaming_cache(request):
    """Give the class, in one way and in the other."""
    return request.getfixturevalue(f"{request.param}_cache")


@pytest.fixture(scope="module")
def both_caches(request, streaming_cache):
    """Have a module's own tests make their caches in one way and in the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request.module, "StreamingCache", streaming_cache)
        yield
