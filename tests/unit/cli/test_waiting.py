"""Commands that wait for nodes say what for: a recovery never guesses, and may wait for ever."""

import asyncio
from typing import cast

from tests.simulation.virtual_loop import run_virtual
from tierlog.cli.ledger import telling
from tierlog.client import Ledgers


class Waiting:
    """Ledgers of which a recovery waits, for another node after a while."""

    def waits_for(self, ledger_id: int) -> str | None:
        assert ledger_id == 7
        now_s = asyncio.get_running_loop().time()
        return None if now_s < 3 else "n2" if now_s < 9 else "n3"


def test_what_a_recovery_waits_for_is_said_once_and_its_outcome_given(capsys):
    async def main() -> None:
        ledgers = cast("Ledgers", Waiting())
        assert await telling(ledgers, 7, asyncio.sleep(15, "closed")) == "closed"

    run_virtual(main())
    said = capsys.readouterr().err.splitlines()
    assert said == [f"the recovery of ledger 7 waits: {one}" for one in ("n2", "n3")]
