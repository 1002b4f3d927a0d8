"""What each operation of the offloader needs: it takes its work from the queue, and has no other.

Invariant: every route has a rule; one without is refused, and fails a test.
"""

from typing import Final

from tierlog.model.access import Rules
from tierlog.runtime.access import COMMON_HTTP_RULES, COSTS_RULES

HTTP_RULES: Final[Rules] = {**COMMON_HTTP_RULES, **COSTS_RULES}
