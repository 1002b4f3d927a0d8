"""Looks for secrets in the files of the repository; CI runs it as a test.

It knows what keys and tokens of well-known kinds look like, and private keys, and passwords in
URLs. It doesn't guess: a password that looks like a word is not found, and what was committed and
removed again is not looked at. ``ALLOWED`` says what may be there, and why.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
FILE_BYTES_MAX: Final = 4 * 1024 * 1024

KINDS: Final = {
    "private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----\s+[A-Za-z0-9+/=]",
    "AWS access key": r"\b(?:AKIA|ASIA|AGPA|AROA|AIDA)[0-9A-Z]{16}\b",
    "AWS secret key": r"(?i)aws_secret_access_key\W{1,6}[A-Za-z0-9/+=]{40}\b",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{60,})\b",
    "GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}\b",
    "Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "Slack webhook": r"hooks\.slack\.com/services/T[A-Z0-9]{8,}/B[A-Z0-9]{8,}/[A-Za-z0-9]{20,}",
    "Google key": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "Stripe key": r"\b[rs]k_live_[0-9A-Za-z]{20,}\b",
    "PyPI token": r"\bpypi-AgEI[A-Za-z0-9_-]{50,}",
    "npm token": r"\bnpm_[A-Za-z0-9]{36}\b",
    "JSON Web Token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}",
    "password in a URL": r"\b[a-z][a-z0-9+]{2,12}://[^\s/:@\"'{}$<>]{1,64}:"
    r"[^\s/:@\"'{}$<>]{3,}@[\w.-]",
}
PATTERNS: Final = {kind: re.compile(pattern) for kind, pattern in KINDS.items()}

ALLOWED: Final = {
    ("tests/contracts/localhost.pem", "private key"): "of one test alone, and worth nothing",
    ("tests/security/test_settings.py", "password in a URL"): "of a test that looks for it",
    ("tests/unit/cli/test_values.py", "password in a URL"): "of a test of how values are read",
    ("tests/unit/runtime/test_redaction.py", "password in a URL"): "of a test that looks for it",
}


class Found(NamedTuple):
    """One place. What is there is not shown."""

    path: str
    line: int
    kind: str


def scan(text: str, path: str) -> list[Found]:
    """Return what looks like a secret."""
    return [
        Found(path, text.count("\n", 0, match.start()) + 1, kind)
        for kind, pattern in PATTERNS.items()
        for match in pattern.finditer(text)
    ]


def tracked() -> list[Path]:
    """Return the files that are, or would be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def scan_tree() -> list[Found]:
    """Return what is found in all of them and is not allowed."""
    found: list[Found] = []
    for path in tracked():
        if not path.is_file() or path.stat().st_size > FILE_BYTES_MAX:
            continue
        name = path.relative_to(ROOT).as_posix()
        found += scan(path.read_text(encoding="utf-8", errors="replace"), name)
    return [one for one in found if (one.path, one.kind) not in ALLOWED]


def main() -> None:
    """Say what is found, and fail if anything is."""
    found = scan_tree()
    for one in found:
        print(f"{one.path}:{one.line}: {one.kind}")
    if found:
        sys.exit("error: secrets in the tree\nremedy: take them out, and make new ones")
    print("no secrets found")


if __name__ == "__main__":
    main()
