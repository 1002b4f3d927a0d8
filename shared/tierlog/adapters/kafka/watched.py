"""The files of TLS, which change while clients run that keep what they read of them.

Owns finding that they are others, and trying them. Does not own making clients anew: publisher and
source do, once ``generation`` has grown.

Invariants:
    * Half written ones, or a key of another certificate, are passed over until they fit.
    * Those that fit count only once a broker has taken a connection with them. Until then clients
      go on with what they have, the log says why, and the files are tried again.
    * Whoever asks for the generation does not wait for a broker.
"""

import ssl
import threading
import time
from pathlib import Path
from typing import Final

from tierlog.adapters.kafka.common import AUTHORITIES, CERTIFICATE, KEY, How, log
from tierlog.adapters.kafka.topics import check_connection
from tierlog.model.errors import TierlogError
from tierlog.runtime.reloading import Reloading

TRY_S_MAX: Final = 5.0
TRY_AGAIN_S: Final = 30.0


class WatchedFiles:
    """Says when the files of TLS are others, and work."""

    def __init__(self, bootstrap: str, how: How) -> None:
        self._bootstrap = bootstrap
        self._how = how
        named = [Path(how[name]) for name in (AUTHORITIES, CERTIFICATE, KEY) if name in how]
        self._files = Reloading(named, self._fit, what="kafka.tls") if named else None
        self._proven = self._tried = 0 if self._files is None else self._files.generation
        self._tried_s = 0.0
        self._trying: threading.Thread | None = None

    def generation(self) -> int:
        """Return a number that grows when they are others, and a broker has taken them."""
        if self._files is None:
            return 0
        self._files.get()
        found, now_s = self._files.generation, time.monotonic()
        is_due = found != self._tried or now_s - self._tried_s >= TRY_AGAIN_S
        is_trying = self._trying is not None and self._trying.is_alive()
        if found != self._proven and is_due and not is_trying:
            self._tried, self._tried_s = found, now_s
            self._trying = threading.Thread(
                target=self._try, args=[found], name="kafka-files", daemon=True
            )
            self._trying.start()
        return self._proven

    def _try(self, generation: int) -> None:
        try:
            check_connection(self._bootstrap, how=self._how, timeout_s=TRY_S_MAX)
        except TierlogError as error:
            log.error("kafka.files_not_taken", cause=str(error), again_s=TRY_AGAIN_S)
        else:
            self._proven = generation

    def _fit(self) -> None:
        context = ssl.create_default_context(cafile=self._how.get(AUTHORITIES))
        if CERTIFICATE in self._how:
            context.load_cert_chain(self._how[CERTIFICATE], self._how.get(KEY))
