"""The keys of ledgers, from settings."""

from tierlog.ledger.keys import LedgerKeys
from tierlog.runtime.settings import Settings, key_bytes


def ledger_keys(settings: Settings) -> LedgerKeys:
    """Return the keys that this process has."""
    return LedgerKeys({key_id: key_bytes(secret) for key_id, secret in settings.keys.items()})
