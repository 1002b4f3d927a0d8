"""No secret is in a file of the repository (tools/secret_scan.py says what it can see)."""

from __future__ import annotations

import pytest

from tools.secret_scan import ALLOWED, KINDS, ROOT, scan, scan_tree

# Made of pieces, so that none stands here.
PLANTED = {
    "private key": "-----BEGIN EC " + "PRIVATE KEY-----\nMHcCAQEE",
    "AWS access key": "AKIA" + "ABCDEFGHIJKLMNOP",
    "AWS secret key": "aws_secret_access_key = " + "a" * 40,
    "GitHub token": "ghp_" + "a" * 36,
    "GitLab token": "glpat-" + "a" * 20,
    "Slack token": "xoxb-" + "1" * 12,
    "Slack webhook": "hooks.slack.com/services/T" + "A" * 8 + "/B" + "A" * 8 + "/" + "a" * 24,
    "Google key": "AIza" + "a" * 35,
    "Stripe key": "sk_" + "live_" + "a" * 24,
    "PyPI token": "pypi-" + "AgEI" + "a" * 60,
    "npm token": "npm_" + "a" * 36,
    "JSON Web Token": "eyJ" + "a" * 20 + ".eyJ" + "a" * 20 + "." + "a" * 43,
    "password in a URL": "redis://user" + ":secret@" + "redis:6379",
}


def test_there_is_none():
    assert scan_tree() == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_would_be_found(kind):
    found = scan(f"first line\nkey: {PLANTED[kind]}\n", "some.txt")
    assert (kind, 2) in {(one.kind, one.line) for one in found}


def test_what_is_allowed_is_there():
    for (path, kind), why in ALLOWED.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert kind in {one.kind for one in scan(text, path)}, path
        assert why
