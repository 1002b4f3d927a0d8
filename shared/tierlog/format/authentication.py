"""The authentication code of runs: HMAC-SHA-256 with a key that storage nodes do not have.

Owns keys, codes and their comparison. Does not own where a code lies (``tierlog.format.run``), nor
which key a ledger has (``tierlog.ledger.keys``).

Invariants:
    * A key's secret is in no text that this module makes, and codes are compared in constant time.
    * A secret is never shorter than ``SECRET_LEN_MIN``, the length of a code.
"""

import hmac
from typing import Final

from tierlog.format.checksum import Buffer
from tierlog.model.errors import RefusedError

MAC_LEN: Final = 32
SECRET_LEN_MIN: Final = 32


class LedgerKey:
    """A secret and the id that metadata call it by."""

    __slots__ = ("_keyed", "key_id")

    def __init__(self, key_id: str, secret: bytes) -> None:
        if len(secret) < SECRET_LEN_MIN:
            raise RefusedError(
                f"ledger key {key_id} has {len(secret)} bytes",
                remedy=f"It needs {SECRET_LEN_MIN} random bytes at least",
            )
        self.key_id = key_id
        # Keyed once: a copy of it costs less than keying anew for each run.
        self._keyed = hmac.new(secret, digestmod="sha256")

    def __repr__(self) -> str:
        return f"<LedgerKey {self.key_id}>"

    def code_of(self, head: Buffer, body: Buffer) -> bytes:
        """Return the code over two buffers, one behind the other."""
        code = self._keyed.copy()
        code.update(head)
        code.update(body)
        return code.digest()

    def agrees(self, head: Buffer, body: Buffer, code: Buffer) -> bool:
        """Tell whether ``code`` is the one of these buffers."""
        return hmac.compare_digest(self.code_of(head, body), code)
