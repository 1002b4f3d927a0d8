"""Profiles: named sets of values, one for each kind of deployment.

Owns which there are and what they set. A profile comes behind arguments and environment, and before
the settings file: a file that is copied from one deployment to another doesn't undo it.

Invariant: every value is one that the models take.
"""

from collections.abc import Mapping
from typing import Any, Final

Values = Mapping[str, Any]

_ONE_NODE: Final[Values] = {
    "owner": {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1},
}

PROFILES: Final[Mapping[str, Values]] = {
    # One machine, which nobody else depends on: one copy of each entry.
    "embedded": {
        "ingest": _ONE_NODE,
        "kafka": {"replication_factor": 1},
    },
    # The same for people who change Tierlog, or programs for it: logs to read, no waiting.
    "development": {
        "ingest": _ONE_NODE,
        "kafka": {"replication_factor": 1},
        "scheduler": {"interval_s": 2.0},
        "log": {"format": "console", "level": "debug"},
    },
    # Several machines, which may fail: the queue has copies too, and copies in S3 are looked at.
    "production": {
        "kafka": {"replication_factor": 3},
        "s3": {"read_back": "sample"},
        "log": {"format": "json", "level": "info"},
    },
}


def profile_values(name: object) -> Values:
    """Return a profile's values; none of a name that is no profile, which validation refuses."""
    return PROFILES.get(name, {}) if isinstance(name, str) else {}


def profile_rows() -> list[dict[str, Any]]:
    """Return every value of every profile, by the setting's name."""
    return [
        {"profile": profile, "setting": name, "value": value}
        for profile, values in PROFILES.items()
        for name, value in _flat(values)
    ]


def _flat(values: Values, before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{name}.")
        else:
            found.append((f"{before}{name}", value))
    return found
