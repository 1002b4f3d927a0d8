"""``tierlog ledger append``: what it says when the ledger is closed without the whole input."""

from collections.abc import Iterable

import pytest
from typer.testing import CliRunner

import tierlog.client
from tierlog.cli import main
from tierlog.client.blocking import Closing
from tierlog.model.errors import RetryableError


class Ledgers(Closing):
    """Ledgers whose writer keeps what it is given."""

    def __init__(self, _settings: object) -> None:
        self.entries: list[bytes] = []
        self.closed = 0

    def write(self, ledger_id: int) -> "Ledgers":
        assert ledger_id == 7
        return self

    def append_all(self, entries: Iterable[bytes]) -> None:
        self.entries.extend(entries)

    def close(self) -> None:
        self.closed += 1


class Interrupted(Ledgers):
    def append_all(self, entries: Iterable[bytes]) -> None:
        del entries
        raise KeyboardInterrupt


class Away(Ledgers):
    def append_all(self, entries: Iterable[bytes]) -> None:
        raise RetryableError("nodes are away", remedy="wait")

    def close(self) -> None:
        raise RetryableError("nodes are away", remedy="wait")


def test_a_ledger_that_could_not_be_closed_is_not_told_as_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tierlog.client, "SyncLedgers", Away)
    done = CliRunner().invoke(main.app, ["ledger", "append", "7"], input=b"a\n")
    assert done.exit_code == 5, done.output
    assert "it is closed" not in done.stderr
    assert "tierlog ledger read 7 --recover" in done.stderr


@pytest.mark.parametrize(
    ("ledgers", "code"), [(Ledgers, 2), (Interrupted, 130)], ids=["refused", "interrupted"]
)
def test_who_is_stopped_half_way_is_told_that_the_ledger_is_closed(
    ledgers: type[Ledgers], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tierlog.client, "SyncLedgers", ledgers)
    cut = b"\x00\x00\x00\x01a\x00\x00\x00\x05b"
    done = CliRunner().invoke(main.app, ["ledger", "append", "7", "-f", "binary"], input=cut)
    assert done.exit_code == code, done.output
    assert "ledger 7 takes no more entries: it is closed with those that came" in done.stderr
    assert "tierlog ledger show 7" in done.stderr
