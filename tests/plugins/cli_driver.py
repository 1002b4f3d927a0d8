"""Runs command lines one after the other in one process, so that its imports are paid once.

Each line of standard input is {"arguments", "stdin" (base64), "env"}; each line of standard
output {"code", "stdout" (base64), "stderr"}.
"""

import base64
import json
import os
import sys

from typer.testing import CliRunner

from tierlog.cli.main import app
from tierlog.cli.session import SESSION


def main() -> None:
    runner = CliRunner()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIERLOG_")}
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ.clear()
        os.environ.update(clean | asked["env"])
        SESSION.debug, SESSION.state_dir = False, None
        done = runner.invoke(app, asked["arguments"], input=base64.b64decode(asked["stdin"]))
        answer = {
            "code": done.exit_code,
            "stdout": base64.b64encode(done.stdout_bytes).decode("ascii"),
            "stderr": done.stderr + ("" if done.exception is None else _trace(done.exception)),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _trace(error: BaseException) -> str:
    """Return what Python would print of an error that got as far as this: a trace."""
    return "" if isinstance(error, SystemExit) else f"Traceback: {error!r}"


if __name__ == "__main__":
    main()
