"""What each message of the wire needs (``tierlog.model.access``), and who sends which.

Invariant: every message that a server takes is here, but HELLO, which says who asks.
"""

from collections.abc import Mapping
from typing import Final

from tierlog.model.access import Permission, Rule, Rules
from tierlog.wire.messages import ROLE_OWNER, ROLE_PRODUCER

WIRE_RULES: Final[Rules] = {
    "append": Rule(permission=Permission.APPEND, stream="stream"),
    "add_runs": Rule(permission=Permission.STORE),
    "lac": Rule(permission=Permission.STORE),
}
MESSAGES_OF_ROLE: Final[Mapping[str, frozenset[str]]] = {
    ROLE_PRODUCER: frozenset({"append"}),
    ROLE_OWNER: frozenset({"add_runs", "lac"}),
}
