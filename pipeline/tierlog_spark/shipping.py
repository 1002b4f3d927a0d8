"""What of a driver's settings goes to its tasks (pure).

Invariant: no password or key goes to an executor that a task has no use for. Spark carries what
it pickles over networks that are often plain.
"""

from typing import Final

from tierlog.runtime.settings import Settings

WITH_SECRETS: Final = frozenset(
    {"keys", "kafka", "redis", "s3", "security", "tracing", "wire", "zookeeper"}
)
"""Sections that hold, or may hold, a secret."""
assert frozenset(Settings.model_fields) >= WITH_SECRETS


def shipped(settings: Settings, *used: str) -> Settings:
    """Return settings as tasks get them: of sections with secrets those alone that they use."""
    assert WITH_SECRETS.issuperset(used)
    fields = Settings.model_fields
    # Of the plain class, whatever read them: a class of this process is nobody else's.
    kept = {name: getattr(settings, name) for name in fields}
    for name in WITH_SECRETS.difference(used):
        kept[name] = fields[name].default
    return Settings.model_construct(**kept)
