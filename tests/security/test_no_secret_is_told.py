"""A capture of logs at debug level under load shows none of 20 planted secrets.

Everything that holds a secret is used (``telling``): servers that take tokens, good and bad ones,
under many requests at once; clients of outer systems that are away, refuse, or answer nonsense.
What they log and raise, our own loggers, the libraries' and what C code writes to standard error,
is looked at.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def planted() -> dict[str, str]:
    """Twenty secrets, each a text that nothing else contains."""
    kinds = (
        "s3-secret-key", "wire-token", "security-token", "token-file", "redis-password",
        "redis-url-password", "redis-secret", "redis-secret-file", "kafka-password",
        "kafka-password-file", "zookeeper-password", "zookeeper-password-file",
        "token-good", "token-expired", "token-other-issuer", "token-nonsense", "basic-password",
        "query-token",
    )  # fmt: skip
    found = {kind: f"planted-{number:02d}-{kind}-hush" for number, kind in enumerate(kinds)}
    found["ledger-key"] = base64.b64encode(b"planted-18-ledger-key-hush-hush!").decode()
    found["tls-key"] = ""  # what is in the file, once it is made
    return found


def test_no_planted_secret_is_logged_or_told(planted, tmp_path):
    where = tmp_path / "planted.json"
    where.write_text(json.dumps(planted), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.telling", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    planted = json.loads(where.read_text(encoding="utf-8"))
    assert len(planted) >= 20
    everything = done.stdout + done.stderr
    # It is a capture of something, at level debug, of our logs and the libraries'.
    for said in ("marker.written", "marker of a library", "cache.lost", "token has expired"):
        assert said in everything
    assert len(done.stderr.splitlines()) > 100
    for kind, secret in planted.items():
        assert secret, kind
        assert secret not in everything, kind
        if "." in secret and kind.startswith("token"):
            assert secret.rpartition(".")[2] not in everything, kind
