"""Taking away what an attempt left in tier 2, finished or not (protocols.md section 3).

Does not own the decision: only attempts that can't complete any more are cleaned.

Invariants:
    * Uploads are aborted before objects are deleted, so that none completes in between; a
      request in flight can still land later, hence the second sweep after its deadline.
    * Repeating it is legal, and says the same.
    * Where the store refuses to list or abort uploads, objects go all the same, but nothing is
      called clean: ``UploadsUnseenError``, so that the attempt stays named and is swept again.
"""

from collections.abc import Sequence
from typing import Final

from prometheus_client import Counter

from tierlog.format import keys
from tierlog.model.errors import RefusedError
from tierlog.model.offload import Tier2Location
from tierlog.ports.objects import ObjectStore

UNSEEN: Final = Counter(
    "tierlog_offload_uploads_unseen_total",
    "Times that open multipart uploads could not be looked for: some may be left",
    ["during"],
)
# From the start: of what appears with its first increase nobody sees an increase.
for _during in ("upload", "sweep", "scrub"):
    UNSEEN.labels(_during)
LET_LIST: Final = (
    "Allow s3:ListBucketMultipartUploads and s3:AbortMultipartUpload; see the reference "
    "s3-permissions"
)


class UploadsUnseenError(RefusedError):
    """Objects were deleted, but nobody knows whether an upload is open."""


async def delete_attempt(objects: ObjectStore, location: Tier2Location) -> int:
    """Delete all that lies under an attempt's keys; return how many uploads were aborted.

    The export copy too, whether there is one or not: it goes with its ledger.
    """
    # The index first: without it nothing takes the data for a whole copy.
    order = (location.index_key, location.side_key, location.data_key, keys.export_key(location))
    every = [key for key in dict.fromkeys(order) if key]
    return await delete_objects(objects, keys.stem_of(location), every)


async def delete_objects(objects: ObjectStore, stem: str, every: Sequence[str]) -> int:
    """Abort the uploads of keys that begin with ``stem``, then delete these objects in order.

    Raises ``UploadsUnseenError`` after that, when the store refuses to list or to abort uploads.
    """
    aborted = 0
    unseen: RefusedError | None = None
    try:
        for upload in await objects.list_uploads(stem):
            if upload.key in every:
                await objects.abort_upload(upload.key, upload.upload_id)
                aborted += 1
    except RefusedError as error:
        unseen = error
    for key in every:
        await objects.delete(key)
    if unseen is not None:
        UNSEEN.labels("sweep").inc()
        raise UploadsUnseenError(
            f"the objects of {stem} are deleted, but an upload may still be open: {unseen.message}",
            reason=unseen.reason,
            remedy=LET_LIST,
            details=unseen.details,
        ) from unseen
    return aborted
