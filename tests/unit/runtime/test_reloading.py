"""Files that change while a process runs: what can't be read is read again, what is bad is not."""

import errno

import pytest
import structlog

from tierlog.runtime.reloading import Reloading


@pytest.mark.parametrize(
    ("error", "reads"),
    [(OSError(errno.EMFILE, "too many open files"), 3), (ValueError("no key"), 1)],
)
def test_a_change_is_not_missed_because_it_could_not_be_read_at_once(tmp_path, error, reads):
    file = tmp_path / "key"
    troubles: list[Exception] = []
    tried = []
    file.write_text("one", encoding="utf-8")

    def make() -> str:
        tried.append(file)
        if troubles:
            raise troubles[0]
        return str(file.read_text(encoding="utf-8"))

    found = Reloading([file], make, what="a key")
    assert found.get() == "one"
    file.write_text("the next one", encoding="utf-8")
    troubles.append(error)
    tried.clear()
    with structlog.testing.capture_logs() as logs:
        assert [found.get() for _ in range(3)] == ["one"] * 3
    assert len(tried) == reads
    assert [one["event"] for one in logs] == ["file.reload_failed"]
    troubles.clear()
    assert found.get() == ("the next one" if reads > 1 else "one")
    file.write_text("one that is whole again", encoding="utf-8")
    assert found.get() == "one that is whole again"
