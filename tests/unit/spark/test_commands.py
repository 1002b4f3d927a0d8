"""What commands make of their options, and how they end; the jobs themselves are not run."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierlog.model.errors import RefusedError
from tierlog.model.ids import StreamName
from tierlog.model.policy import MIB
from tierlog.offload.verify import ReadBack
from tierlog.runtime.settings import S3Settings
from tierlog_spark.cli.main import app
from tierlog_spark.jobs import bulk_offload, moving, scrub, session
from tierlog_spark.jobs.frame import JobReport

DAY_MS = 86_400_000
OWN = {
    "TIERLOG_S3__ENDPOINT_URL": "http://own:1",
    "TIERLOG_S3__REGION": "eu-own-1",
    "TIERLOG_S3__ACCESS_KEY": "own-key",
    "TIERLOG_S3__SECRET_KEY": "own-secret",
    "TIERLOG_S3__BUCKET": "own",
    "TIERLOG_S3__KEY_PREFIX": "below",
    "TIERLOG_S3__READ_TIMEOUT_S": "7",
    "TIERLOG_ZOOKEEPER__HOSTS": "z:1",
}


class Asked:
    """A job in the place of the real one: takes what it is given, and reports these counts."""

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}
        self.counts: dict[str, int | float] = {}
        self.rows: Sequence[dict[str, Any]] = ()

    def __call__(self, run: Any, *given: Any, **named: Any) -> JobReport:
        self.given, self.named = given, named
        return JobReport(job="job", dry_run=run.dry_run, counts=self.counts, rows=self.rows)


Words = Callable[..., Any]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Words:
    """Give what runs a command, and asserts its exit code."""

    @contextlib.contextmanager
    def nothing(**_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(session, "job_session", nothing)
    monkeypatch.setattr("tierlog.cli.session._quiet_logs", lambda _: None)
    env = {**OWN, "TIERLOG_STATE_DIR": str(tmp_path)}

    def run(*given: str, code: int = 0, **more: str) -> Any:
        done = CliRunner().invoke(app, [*given, "-q"], env={**env, **more})
        assert done.exit_code == code, done.output
        return done

    return run


def placed(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Asked:
    asked = Asked()
    monkeypatch.setattr(module, name, asked)
    return asked


def said(s3: S3Settings) -> dict[str, Any]:
    secret = s3.secret_key
    return {
        "endpoint_url": s3.endpoint_url,
        "endpoint_name": s3.endpoint_name,
        "region": s3.region,
        "keys": (s3.access_key, None if secret is None else secret.get_secret_value()),
        "bucket": s3.bucket,
        "key_prefix": s3.key_prefix,
    }


OURS = {
    "endpoint_url": "http://own:1",
    "endpoint_name": "default",
    "region": "eu-own-1",
    "keys": ("own-key", "own-secret"),
    "bucket": "own",
    "key_prefix": "below",
}
THEIRS = {**OURS, "bucket": "other", "key_prefix": "some/place"}


@pytest.mark.parametrize(
    ("options", "more", "differs"),
    [
        ((), {}, {}),
        (("--endpoint-url", "https://s3.eu-2"), {}, {"endpoint_url": "https://s3.eu-2"}),
        (("--endpoint-name", "eu"), {}, {"endpoint_name": "eu"}),
        (("--region", "eu-2"), {}, {"region": "eu-2"}),
        (
            ("--access-key", "key", "--secret-key", "secret"),
            {},
            {"keys": ("key", "secret")},
        ),
        (
            ("--region", "eu-2", "--access-key", "key"),
            {"TIERLOG_OTHER_SECRET_KEY": "secret"},
            {"region": "eu-2", "keys": ("key", "secret")},
        ),
    ],
)
def test_what_is_said_of_the_other_bucket_is_of_that_one_alone(
    words: Words,
    monkeypatch: pytest.MonkeyPatch,
    options: Sequence[str],
    more: dict[str, str],
    differs: dict[str, Any],
) -> None:
    url = "s3://other/some/place/"
    asked = placed(monkeypatch, moving, "copy")
    words("copy", "--to", url, *options, **more)
    [move] = asked.given
    assert (said(move.source), said(move.target)) == (OURS, {**THEIRS, **differs})
    # What nobody can say is as in the settings.
    assert move.target.read_timeout_s == 7
    assert (move.restores, move.read_back, move.layout) == (False, ReadBack.FULL, None)
    asked = placed(monkeypatch, moving, "restore")
    words("restore", "--from", url, "--bytes-per-s", "5MB", *options, **more)
    [move] = asked.given
    assert (said(move.source), said(move.target)) == ({**THEIRS, **differs}, OURS)
    assert (move.deep, move.bytes_per_s) == (True, 5 * MIB)


@pytest.mark.parametrize(
    ("job", "options"), [("copy", ("--to", "s3://x")), ("restore", ("--from", "s3://x"))]
)
def test_the_other_buckets_keys_belong_together(
    words: Words, job: str, options: Sequence[str]
) -> None:
    for more in ({"access": "key"}, {"TIERLOG_OTHER_SECRET_KEY": "secret"}):
        given = ("--access-key", more.pop("access")) if "access" in more else ()
        assert "belong together" in words(job, *options, *given, code=2, **more).stderr


@pytest.mark.parametrize(
    ("job", "options"), [("copy", ("--to", "s3://x")), ("restore", ("--from", "s3://x"))]
)
def test_the_other_endpoint_is_an_address(words: Words, job: str, options: Sequence[str]) -> None:
    found = words(job, *options, "--endpoint-url", "minio:9000", code=2).stderr
    assert "'minio:9000' is no address" in found
    assert "http://HOST:PORT" in found


@pytest.mark.parametrize("reads", ["inf", "nan", "-1"])
def test_how_often_all_is_read_is_a_number(words: Words, reads: str) -> None:
    assert "--reads" in words("cost", "--reads", reads, code=2).stderr


def test_a_back_fill_is_of_what_its_options_say(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = placed(monkeypatch, bulk_offload, "bulk_offload")
    words("bulk-offload")
    settings, wish = asked.given
    assert (said(settings.s3), settings.zookeeper.hosts) == (OURS, "z:1")
    assert wish == bulk_offload.BackFill(task_bytes=1024 * MIB)

    class Noon:
        def wall_ms(self) -> int:
            return 3 * DAY_MS

    monkeypatch.setattr("tierlog.wiring.build.system_clock", Noon)
    words(
        *("bulk-offload", "--stream", "a", "--stream", "b", "--older-than", "1d"),
        *("--bytes-per-s", "50MB", "--task-bytes", "2MB"),
    )
    assert asked.given[1] == bulk_offload.BackFill(
        streams=(StreamName("a"), StreamName("b")),
        closed_before_ms=2 * DAY_MS,
        bytes_per_s=50 * MIB,
        task_bytes=2 * MIB,
    )
    for wrong in (
        ("--older-than", "never"),
        ("--bytes-per-s", "0"),
        ("--task-bytes", "0"),
    ):
        assert "remedy: " in words("bulk-offload", *wrong, code=2).stderr


def test_a_scrub_is_deep_and_as_fast_as_it_goes_unless_told(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = placed(monkeypatch, scrub, "scrub")
    words("scrub")
    assert said(asked.given[0].s3) == OURS
    assert asked.named == {"deep": True, "bytes_per_s": 0}
    words("scrub", "--no-deep", "--bytes-per-s", "2MB")
    assert asked.named == {"deep": False, "bytes_per_s": 2 * MIB}


@pytest.mark.parametrize(
    ("job", "counts", "code"),
    [
        ("bulk-offload", {"complete": 3, "incomplete": 0, "streams_failed": 0}, 0),
        ("bulk-offload", {"complete": 2, "incomplete": 1, "streams_failed": 0}, 5),
        ("bulk-offload", {"complete": 3, "incomplete": 0, "streams_failed": 1}, 5),
        ("scrub", {"remaining": 0, "unread": 0}, 0),
        ("scrub", {"remaining": 2, "unread": 0}, 6),
        ("scrub", {"remaining": 0, "unread": 1}, 5),
        # What is wrong is worse than what could not be looked at.
        ("scrub", {"remaining": 1, "unread": 1}, 6),
    ],
)
def test_a_command_that_left_something_undone_says_so_by_its_exit_code(
    words: Words,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    job: str,
    counts: dict[str, int | float],
    code: int,
) -> None:
    module, name = (scrub, "scrub") if job == "scrub" else (bulk_offload, "bulk_offload")
    asked = placed(monkeypatch, module, name)
    asked.counts, asked.rows = counts, [{"stream": "s", "ledger_id": 7}]
    metrics = tmp_path / "job.prom"
    done = words(job, "-o", "json", "--metrics", str(metrics), code=code)
    assert json.loads(done.stdout) == {
        "job": "job",
        "dry_run": False,
        **counts,
        "rows": [{"stream": "s", "ledger_id": 7}],
    }
    assert f'tierlog_spark_job_exit_code{{job="job"}} {code}.0' in metrics.read_text("utf-8")
    assert "7" in words(job, code=code).stdout
    assert json.loads(words(job, "--dry-run", "-o", "json", code=code).stdout)["dry_run"]


def test_an_error_of_the_job_is_told_with_its_remedy(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> JobReport:
        raise RefusedError("the bucket is another cluster's", remedy="Correct the settings")

    monkeypatch.setattr(scrub, "scrub", refused)
    told = words("scrub", code=2).stderr
    assert "error: the bucket is another cluster's" in told
    assert "remedy: Correct the settings" in told


def test_a_report_is_not_lost_to_its_metrics(
    words: Words, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = placed(monkeypatch, scrub, "scrub")
    done = words("scrub", "--metrics", str(tmp_path / "none" / "scrub.prom"), code=2)
    assert f"there is no folder {tmp_path / 'none'}" in done.stderr
    done = words("scrub", "--metrics", str(tmp_path), code=2)
    assert f"--metrics {tmp_path}: that is a folder" in done.stderr
    assert asked.given == (), "nothing was begun"

    # What can't be written in the end, since a folder has that name by then.
    metrics = tmp_path / "scrub.prom"

    def scrubbed(*given: Any, **named: Any) -> JobReport:
        metrics.mkdir()
        return asked(*given, **named)

    monkeypatch.setattr(scrub, "scrub", scrubbed)
    for remaining, code in ((0, 1), (1, 6)):
        asked.counts = {"remaining": remaining, "unread": 0}
        done = words("scrub", "-o", "json", "--metrics", str(metrics), code=code)
        assert json.loads(done.stdout)["job"] == "job"
        assert "error: " in done.stderr
        metrics.rmdir()
