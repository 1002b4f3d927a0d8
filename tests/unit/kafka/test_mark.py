"""Looking at a topic where no client can be made: one of the errors that a pass can tell."""

import asyncio
from pathlib import Path

import pytest

from tierlog.adapters.kafka.topics import mark_topic
from tierlog.model.errors import RetryableError


def test_files_of_tls_that_are_wrong_for_a_while_are_no_defect(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("half of it")
    how = {"security.protocol": "ssl", "ssl.ca.location": str(ca)}
    with pytest.raises(RetryableError, match="describing topic requested"):
        asyncio.run(mark_topic("127.0.0.1:1", "requested", timeout_s=1.0, how=how))
