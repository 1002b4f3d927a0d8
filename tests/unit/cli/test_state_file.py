"""``tierlog append --state``: a file that always holds a whole state, and what is refused."""

import random
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import orjson
import pytest
from typer.testing import CliRunner

from tierlog.adapters.memory.ids import SeededIds
from tierlog.cli import main
from tierlog.cli.state_file import save_state, writer_state
from tierlog.client import WriterState
from tierlog.client.idempotent import Numbers
from tierlog.model.errors import RefusedError
from tierlog.model.ids import StreamName

ONE, OTHER = UUID(int=1 << 100), UUID(int=2 << 100)


class Client:
    """Gives states of new writers, as a client does."""

    def __init__(self) -> None:
        self._ids = SeededIds(random.Random(1))

    def new_writer_state(self) -> WriterState:
        return WriterState(writer_id=self._ids.uuid())


CLIENT = cast("Any", Client())


def test_a_new_state_is_in_its_file_before_it_is_used(tmp_path: Path):
    path = tmp_path / "state"
    state = writer_state(CLIENT, path, None)
    assert state is not None
    assert WriterState.of_document(orjson.loads(path.read_bytes())) == state
    assert writer_state(CLIENT, path, None) == state
    assert [one.name for one in tmp_path.iterdir()] == ["state"]


def test_a_later_state_takes_the_place_of_the_one_before(tmp_path: Path):
    path = tmp_path / "state"
    save_state(path, WriterState(writer_id=ONE))
    numbers = {StreamName("logs"): Numbers(acked=3, sent=5)}
    save_state(path, WriterState(writer_id=ONE, streams=numbers))
    assert writer_state(CLIENT, path, ONE) == WriterState(writer_id=ONE, streams=numbers)
    with pytest.raises(RefusedError, match=str(ONE)):
        writer_state(CLIENT, path, OTHER)


def test_an_id_alone_needs_no_file():
    assert writer_state(CLIENT, None, ONE) == WriterState(writer_id=ONE)
    assert writer_state(CLIENT, None, None) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"version": 1}'])
def test_a_file_that_holds_none_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes):
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(RefusedError):
        writer_state(CLIENT, path, None)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--if-after", "earliest", "--raw"), "raw"),
        (("--if-after", "earliest", "--state", "s"), "keeps no state"),
        (("--if-last-event-number", "0", "--batch-bytes", "7"), "one entry"),
        (("--if-after", "latest"), "always holds"),
        (("--if-after", "x"), "position"),
    ],
)
def test_conditions_that_make_no_sense_are_refused_at_once(options: tuple[str, ...], word: str):
    done = CliRunner().invoke(main.app, ["append", "logs", *options], input=b"x\n")
    assert done.exit_code == 2
    assert word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("set", "logs", "event-count=1"), "event-count is a core attribute"),
        (("set", "logs", "roll-over-bytes=1"), "roll-over-bytes is a core attribute"),
        (("set", "logs", f"{UUID(int=4)}=1"), "scale-policy-rate is a core attribute"),
        (("set", "logs", f"{UUID(int=11)}=1"), "core attribute"),
        (("set", "logs", f"{ONE}"), "64 bits"),
        (("set", "logs", f"{ONE}=9223372036854775808"), "64 bits"),
        (("set", "logs", "x=1"), "attribute's key"),
        (("set", "logs", f"{ONE}=1", "--expected", "1"), "belong together"),
        (("set", "logs", f"{ONE}=1", "--verb", "replace-if-equals"), "belong together"),
        (("get", "logs", "nothing"), "attribute's key"),
    ],
)
def test_attributes_that_make_no_sense_are_refused_at_once(arguments: tuple[str, ...], word: str):
    done = CliRunner().invoke(main.app, ["attributes", *arguments])
    assert done.exit_code == 2
    assert word in done.stderr
