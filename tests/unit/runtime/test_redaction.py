"""Secrets are in no line of the log, however they got there."""

import base64
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pydantic import SecretStr

from tierlog.model.errors import RetryableError
from tierlog.runtime.redaction import MASK, Redactor, secrets_of
from tierlog.runtime.settings import load_settings

ROOT = Path(__file__).resolve().parents[3]

PLANTED = {
    "TIERLOG_S3__SECRET_KEY": "pl4nted/s3+secret=key",
    "TIERLOG_WIRE__TOKEN": 'pl4nted "wire" tok\\en',
    "TIERLOG_REDIS__URL": "redis://user:pl4nted-redis-pw@cache:6379/0",
    "TIERLOG_KEYS__K1": base64.b64encode(b"pl4nted ledger key of 32 bytes!!").decode(),
    "TIERLOG_TRACING__HEADERS": "authorization=pl4nted-otlp-header",
}
VALUES = [
    PLANTED["TIERLOG_S3__SECRET_KEY"],
    PLANTED["TIERLOG_WIRE__TOKEN"],
    "pl4nted-redis-pw",
    PLANTED["TIERLOG_KEYS__K1"],
    PLANTED["TIERLOG_TRACING__HEADERS"],
]


@pytest.fixture
def settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TIERLOG_")]:
        monkeypatch.delenv(name)
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    return load_settings()


def test_the_secrets_of_settings_are_found_wherever_they_stand(settings):
    assert secrets_of(settings) == {*VALUES, "pl4nted-otlp-header"}


@pytest.mark.parametrize("secret", VALUES)
@pytest.mark.parametrize(
    "hide",
    [
        lambda secret: secret,
        lambda secret: f"before {secret} behind",
        lambda secret: {"deep": [{"deeper": (secret,)}]},
        lambda secret: {secret: "as a name"},
        lambda secret: {secret},
        lambda secret: secret.encode(),
        lambda secret: RetryableError(f"said {secret}", remedy=f"use {secret}"),
        lambda secret: json.dumps({"a": secret}),
        lambda secret: repr({"a": secret}),
        SecretStr,
    ],
)
def test_a_learned_secret_comes_out_of_nothing(settings, secret, hide):
    shown = Redactor(secrets_of(settings))(None, "info", {"event": "a.b", "x": hide(secret)})
    text = json.dumps(shown) + repr(shown) + str(shown)
    for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
        assert form not in text
    assert "*" in text


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("redis://u:hush-hush@host:1/0 is away", "hush-hush"),
        ("https://hush-hush@collector/v1", "hush-hush"),
        ("Authorization: Bearer hush.hush-hush", "hush.hush-hush"),
        ("GET /k?X-Amz-Signature=0123abcd&x=1", "0123abcd"),
        ("got eyJhbGciOiJI.eyJzdWIiOiJ4.c2lnbmF0dXJl back", "c2lnbmF0dXJl"),
        ("-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----", "MHc"),
        ("-----BEGIN PRIVATE KEY-----\nMHcCut", "MHcCut"),
    ],
)
def test_what_looks_like_a_secret_is_masked_too(text, secret):
    shown = Redactor().text(text)
    assert secret not in shown
    assert MASK in shown


@pytest.mark.parametrize(
    "name",
    ["password", "db.password", "secret_key", "token", "Authorization", "api_key", "secrets"],
)
def test_what_a_field_calls_secret_is_masked(name):
    assert Redactor().named(name, "hush") == MASK
    assert Redactor().value({name: ["hush"]}) == {name: MASK}


@pytest.mark.parametrize(
    "value",
    ["s3://bucket/key", "host:9092,other:9092", "position 3:4@5", "a/b@c", 7, 1.5, True, None],
)
def test_what_is_no_secret_stays(value):
    assert Redactor(["unrelated"]).value(value) == value
    assert Redactor().named("tokens_left", 3) == 3
    assert Redactor().named("secret", "") == ""


def test_short_values_are_not_looked_for():
    assert Redactor(["ab", ""]).text("abcab") == "abcab"


def test_one_secret_inside_of_another_leaves_nothing_behind():
    assert Redactor(["hush", "hush-more-hush"]).text("x hush-more-hush y") == f"x {MASK} y"


PROGRAM = """
    import asyncio, logging, os, sys, structlog
    from tierlog.runtime.service import run_service
    log = structlog.get_logger()
    async def main(settings, stop):
        secrets = [
            settings.s3.secret_key.get_secret_value(), settings.wire.token.get_secret_value(),
            settings.redis.password.get_secret_value(), settings.keys["k1"].get_secret_value(),
            settings.tracing.headers.get_secret_value(),
        ]
        for secret in secrets:
            structlog.contextvars.bind_contextvars(bound=secret)
            log.debug("planted.bound", why=secret, deep={"a": [secret]})
            logging.getLogger("botocore").warning("foreign %s", secret)
            try:
                raise ValueError(f"trace {secret}")
            except ValueError as error:
                log.exception("planted.trace")
                logging.getLogger("kazoo").exception("foreign trace")
        structlog.contextvars.unbind_contextvars("bound")
        print(settings, repr(settings), file=sys.stderr)
        raise ValueError(f"the last word: {secrets}")
    sys.exit(run_service("test", main))
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_whole_process_that_logs_its_secrets_shows_none(form):
    """At debug level: its own lines, those of libraries, traces, what ends it."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("TIERLOG_")}
    environment |= PLANTED | {"TIERLOG_LOG__LEVEL": "debug", "TIERLOG_LOG__FORMAT": form}
    environment["TIERLOG_SECURITY__MODE"] = "open"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("planted.bound") >= len(VALUES)
    assert done.stderr.count("foreign trace") == len(VALUES)
    assert "the last word" in done.stderr
    for secret in VALUES:
        for shown in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            assert shown not in done.stderr + done.stdout
