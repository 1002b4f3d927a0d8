"""Index objects, from a cache that readers share or from the bucket (seeds/000).

Invariants:
    * With a digest from the ledger's context, nothing else is believed: a cached value that
      differs is refused and read again from the bucket; a bucket that differs is ``CorruptError``.
    * Without a digest (objects that Pulsar wrote) the cache is not used.
"""

import hashlib

import structlog

from tierlog.format import keys
from tierlog.format.index import INDEX_LEN_MAX, ObjectIndex
from tierlog.format.keys import ObjectRole
from tierlog.model.errors import CorruptError
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.scrub import REPAIR_COPY
from tierlog.offload.ranges import object_gone
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectReads

log = structlog.get_logger()

INDEX_TTL_S = 3600


async def load_index(
    objects: ObjectReads,
    location: Tier2Location,
    *,
    copy: Tier2Copy | None = None,
    cache: SharedCache | None = None,
    ttl_s: int = INDEX_TTL_S,
) -> ObjectIndex:
    """Return an attempt's index, checked."""
    digest = copy.index_sha256 if copy is not None else b""
    trusted = cache if digest else None
    if trusted is not None:
        found = await _cached(trusted, location, digest)
        if found is not None:
            return found
    key = location.index_key
    # Who can write into the bucket could fill the memory of each that opens the ledger.
    known_len = copy.index_len if copy is not None and digest else 0
    answer = await objects.get(key, bytes_max=known_len or INDEX_LEN_MAX)
    if answer is None:
        raise object_gone(key)
    info, raw = answer
    keys.check_object_metadata(info.metadata, ObjectRole.INDEX, key=key)
    if digest and hashlib.sha256(raw).digest() != digest:
        raise CorruptError(
            f"index object {key} has another digest than the ledger's context",
            remedy=REPAIR_COPY,
            details={"object": key, "offset": "0"},
        )
    index = _decoded(raw, key)
    if trusted is not None:
        await trusted.put(index_cache_key(location), raw, ttl_s=ttl_s)
    return index


async def _cached(cache: SharedCache, location: Tier2Location, digest: bytes) -> ObjectIndex | None:
    raw = await cache.get(index_cache_key(location))
    if raw is None:
        return None
    if hashlib.sha256(raw).digest() != digest:
        log.warning("index.cache_refused", key=location.index_key, length=len(raw))
        return None
    return _decoded(raw, location.index_key)


def index_cache_key(location: Tier2Location) -> str:
    """Return under which key readers share an attempt's index."""
    return f"index:{location.endpoint_name}:{location.bucket}:{location.index_key}"


def _decoded(raw: bytes, key: str) -> ObjectIndex:
    try:
        return ObjectIndex.decode(raw)
    except CorruptError as error:
        raise CorruptError(
            f"{key}: {error.message}",
            remedy=error.remedy,
            details={**error.details, "object": key},
        ) from error
