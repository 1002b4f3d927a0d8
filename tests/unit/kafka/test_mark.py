"""Looking at a topic in each pass: its errors are told, and hold up no loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from tierlog.adapters.kafka import topics
from tierlog.adapters.kafka.topics import mark_topic
from tierlog.model.errors import RetryableError
from tierlog.offload.topics import TopicSpec


def test_files_of_tls_that_are_wrong_for_a_while_are_no_defect(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("half of it")
    how = {"security.protocol": "ssl", "ssl.ca.location": str(ca)}
    with pytest.raises(RetryableError, match="describing topic requested"):
        asyncio.run(mark_topic("127.0.0.1:1", "requested", timeout_s=1.0, how=how))


SPEC = TopicSpec(name="requested", partitions=1, replication_factor=1)


@pytest.mark.parametrize(
    "ask",
    [
        partial(mark_topic, name="requested"),
        partial(topics.ensure_topics, specs=[SPEC]),
        partial(topics.apply_topics, specs=[SPEC]),
    ],
)
def test_a_client_that_failed_has_ended_before_anybody_collects_it(
    ask: Callable[..., Coroutine[Any, Any, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end waits for names that are being looked up: 15 s of a loop, where nobody answers."""
    ended: list[str] = []

    class Watched(AdminClient):
        def __exit__(self, *given: object) -> Any:
            found = super().__exit__(*given)
            ended.append(threading.current_thread().name)
            return found

    monkeypatch.setattr(topics, "AdminClient", Watched)
    with pytest.raises(RetryableError):
        asyncio.run(ask("127.0.0.1:1", timeout_s=0.5))
    assert len(ended) == 1
    assert ended != [threading.main_thread().name]
