"""Looking at a topic in each pass: its errors are told, and hold up no loop."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from tierlog.adapters.kafka import topics
from tierlog.adapters.kafka.topics import mark_topic
from tierlog.model.errors import RetryableError


def test_files_of_tls_that_are_wrong_for_a_while_are_no_defect(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("half of it")
    how = {"security.protocol": "ssl", "ssl.ca.location": str(ca)}
    with pytest.raises(RetryableError, match="describing topic requested"):
        asyncio.run(mark_topic("127.0.0.1:1", "requested", timeout_s=1.0, how=how))


def test_a_client_that_failed_has_ended_before_anybody_collects_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end waits for names that are being looked up: 15 s of a loop, where nobody answers."""
    ended: list[str] = []

    class Watched(AdminClient):
        def __exit__(self, *given: object) -> Any:
            found = super().__exit__(*given)
            ended.append(threading.current_thread().name)
            return found

    monkeypatch.setattr(topics, "AdminClient", Watched)
    with pytest.raises(RetryableError, match="describing topic requested"):
        asyncio.run(mark_topic("127.0.0.1:1", "requested", timeout_s=0.5))
    assert len(ended) == 1
    assert ended != [threading.main_thread().name]
