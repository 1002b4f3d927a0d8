"""Which key a ledger has, and whether its runs were signed with it (ADR-0015).

Owns the keys of a process, and what it means to lack one. Does not own where secrets come from,
nor the code itself (``tierlog.format.authentication``).

Invariants:
    * The ledger's metadata decides: digest type HMAC means that every run is signed, and with
      the key whose id it names. No run of such a ledger is believed unverified.
    * A process without that key refuses, before it asks anyone for anything.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from tierlog.format.authentication import LedgerKey
from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import KEY_KEY_ID, DigestType, LedgerMetadata


class LedgerKeys:
    """The keys that a process has, by id."""

    def __init__(self, secrets: Mapping[str, bytes]) -> None:
        self._keys = {key_id: LedgerKey(key_id, secret) for key_id, secret in secrets.items()}

    def __repr__(self) -> str:
        return f"<LedgerKeys {sorted(self._keys)}>"

    def of(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> LedgerKey | None:
        """Return a ledger's key; None: it has none. PERMISSION_DENIED: it is not known here."""
        if metadata.digest_type is not DigestType.HMAC:
            return None
        raw = metadata.custom.get(KEY_KEY_ID)
        key_id = raw.decode("utf-8", "replace") if raw is not None else None
        return self._known(key_id, f"ledger {ledger_id}")

    def named(self, key_id: str) -> LedgerKey:
        """Return a key by its id, or raise PERMISSION_DENIED."""
        return self._known(key_id, "a new ledger")

    def _known(self, key_id: str | None, what: str) -> LedgerKey:
        key = self._keys.get(key_id) if key_id is not None else None
        if key is None:
            name = f"key {key_id}, which this process does not have" if key_id else "an unnamed key"
            variable = f"TIERLOG_KEYS__{(key_id or 'ID').upper()}"
            raise RefusedError(
                f"the runs of {what} are signed with {name}",
                reason=Reason.PERMISSION_DENIED,
                remedy=f"Give this process the key, by {variable} or by keys in its settings file",
                details={"key_id": key_id or ""},
            )
        return key


NO_KEYS: Final = LedgerKeys({})


def authentic(
    runs: Sequence[Run], key: LedgerKey | None
) -> tuple[Sequence[Run], CorruptError | None]:
    """Return the runs up to the first that is not what the ledger's owner wrote, and why not."""
    if key is None:
        return runs, None
    for count, run in enumerate(runs):
        try:
            run.check_mac(key)
        except CorruptError as error:
            return runs[:count], error
    return runs, None
