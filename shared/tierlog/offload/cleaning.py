"""Taking away what an attempt left in tier 2, finished or not (protocols.md section 3).

Does not own the decision: only attempts that can't complete any more are cleaned.

Invariants:
    * Uploads are aborted before objects are deleted, so that none completes in between; a
      request in flight can still land later, hence the second sweep after its deadline.
    * Repeating it is legal, and says the same.
"""

from tierlog.model.offload import Tier2Location
from tierlog.ports.objects import ObjectStore


async def delete_attempt(objects: ObjectStore, location: Tier2Location) -> int:
    """Delete all that lies under an attempt's keys; return how many uploads were aborted."""
    aborted = 0
    for key in (location.data_key, location.index_key, location.side_key):
        # The index's and the side object's key begin with the data object's.
        for upload in await objects.list_uploads(key):
            if upload.key == key:
                await objects.abort_upload(key, upload.upload_id)
                aborted += 1
    # The index first: without it nothing takes the data for a whole copy.
    for key in (location.index_key, location.side_key, location.data_key):
        await objects.delete(key)
    return aborted
