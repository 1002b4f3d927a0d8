"""Catalogs are those of PyIceberg's own configuration; what is wrong with one is told clearly."""

import importlib.util
import json
import socket
import subprocess
import sys

import pytest
from pyiceberg.utils.config import Config
from typer.testing import CliRunner

from tests.unit.spark.iceberg_kit import (
    DAY,
    TABLE,
    Export,
    catalog_at,
    filled,
    options_for,
    properties_at,
    rows_in,
)
from tests.unit.spark.iceberg_rest import rest_server
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.runtime.settings import S3Settings
from tierlog_spark.cli.main import app
from tierlog_spark.jobs.frame import Run
from tierlog_spark.jobs.iceberg import fill_table
from tierlog_spark.jobs.iceberg.tables import opened_catalog


@pytest.fixture
def export(tmp_path):
    made = Export(tmp_path / "exports")
    made.claim()
    made.commit(DAY)
    return made


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Set what the configuration has of a catalog, as a new process would read it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def configure(name="default", **properties):
        for key, value in properties.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__{name}__{key}".upper(), value)
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())

    return configure


def test_the_command_fills_a_table_and_tells(export, configured, tmp_path, monkeypatch):
    monkeypatch.setattr("tierlog.cli.session._quiet_logs", lambda _: None)
    monkeypatch.setenv("TIERLOG_STATE_DIR", str(tmp_path / "none"))
    state = tmp_path / "state"
    configured("shop", **properties_at(state))

    def run(*words, code=0):
        done = CliRunner().invoke(app, ["iceberg", *words])
        assert done.exit_code == code, done.output
        return done

    words = ["orders", "--from", "exports", "--table", "logs.orders", "--catalog", "shop"]
    dry = json.loads(run(*words, "-o", "json", "--dry-run").stdout)
    assert (dry["dry_run"], dry["files"], dry["commits"]) == (True, 1, 0)
    nowhere = run(*words, "--metrics", str(tmp_path / "none" / "iceberg.prom"), code=2)
    assert f"there is no folder {tmp_path / 'none'}" in nowhere.stderr
    prom = tmp_path / "iceberg.prom"
    done = json.loads(run(*words, "-o", "json", "--metrics", str(prom)).stdout)
    assert (done["files"], done["events"], done["commits"], done["rows"][0]["to"]) == (1, 4, 1, 2)
    assert 'tierlog_spark_job_files{job="iceberg"} 1.0' in prom.read_text(encoding="utf-8")
    # The same folder by another name, and nothing to do.
    again = run("orders", "--from", "x/../exports", *words[3:])
    assert "iceberg: 0 files" in again.stderr
    assert "logs.orders" in again.stdout
    with catalog_at(state) as catalog:
        catalog.name = "shop"
        assert rows_in(catalog.load_table(TABLE)) == export.rows()
    nothing = run("returns", *words[1:4], "logs.returns", *words[5:], code=3)
    assert "there is no export at" in nothing.stderr
    assert "remedy: " in nothing.stderr


def test_a_rest_catalog_is_named_by_its_uri(export, configured, tmp_path):
    with catalog_at(tmp_path / "state") as catalog, rest_server(catalog) as server:
        configured(uri=server.url)
        # The table is made with its first files, and the answer is lost.
        server.answers = [502]
        done = fill_table(Run(), options_for(export.folder))
        assert (done.counts["files"], done.counts["commits"]) == (1, 1)
        assert len(catalog.load_table(TABLE).snapshots()) == 1
        # The catalog did it, and says so, or an error, or hangs up.
        for status in (500, 502, 504, 409, 503, 0):
            export.commit(DAY)
            server.answers = [status]
            done = fill_table(Run(), options_for(export.folder))
            assert (done.counts["files"], done.counts["commits"]) == (1, 1)
            assert server.answers == []
        assert rows_in(catalog.load_table(TABLE)) == export.rows()
        assert len(catalog.load_table(TABLE).snapshots()) == 7
        export.commit(DAY)
        server.answers = [403]
        with pytest.raises(RefusedError) as caught:
            fill_table(Run(), options_for(export.folder))
        assert caught.value.reason is Reason.PERMISSION_DENIED
        for status, reason in ((401, Reason.UNAUTHENTICATED), (403, Reason.PERMISSION_DENIED)):
            server.config_status = status
            with pytest.raises(RefusedError) as caught:
                fill_table(Run(), options_for(export.folder))
            assert caught.value.reason is reason
        server.config_status = 503
        with pytest.raises(RetryableError, match="the catalog can't be reached"):
            fill_table(Run(), options_for(export.folder))


def test_a_table_that_another_run_makes_first_is_filled(export, configured, tmp_path):
    with catalog_at(tmp_path / "state") as catalog, rest_server(catalog) as server:
        configured(uri=server.url)
        catalog.create_namespace("logs")
        server.before = [lambda: filled(export, catalog)]
        done = fill_table(Run(), options_for(export.folder))
        assert server.before == []
        assert (done.counts["files"], done.counts["commits"]) == (0, 0)
        assert rows_in(catalog.load_table(TABLE)) == export.rows()


def test_a_catalog_that_is_nowhere_is_unavailable(export, configured, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        configured(uri=f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RetryableError, match="the catalog can't be reached") as caught:
            fill_table(Run(), options_for(export.folder))
    assert "PyIceberg's configuration" in caught.value.remedy
    configured(uri=f"sqlite:///{tmp_path}/no/such/folder/catalog.db")
    with pytest.raises(RetryableError, match="unable to open database file"):
        fill_table(Run(), options_for(export.folder))


def test_a_catalog_that_is_not_set_up_is_refused(export, configured, tmp_path):
    configured()
    with pytest.raises(RefusedError, match="the catalog can't be opened") as caught:
        fill_table(Run(), options_for(export.folder))
    assert "PYICEBERG_CATALOG__" in caught.value.remedy
    configured(uri=f"sqlite:///{tmp_path}/catalog.db")
    with pytest.raises(RefusedError, match="No default path is set"):
        fill_table(Run(), options_for(export.folder))
    for table in ("orders", "logs.", ".orders"):
        with pytest.raises(RefusedError, match="is no name of a table"):
            fill_table(Run(), options_for(export.folder, table=table))


def test_nothing_needs_the_extra_before_a_table_is_filled():
    code = (
        "import sys; sys.modules.update(pyiceberg=None, sqlalchemy=None); "
        "import tierlog_spark.cli.main, tierlog_spark.cli.iceberg, tierlog_spark.jobs.iceberg"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("missing", ["pyiceberg", "sqlalchemy"])
def test_the_extra_that_is_not_installed_is_named(export, monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(RefusedError, match="PyIceberg is not installed") as caught:
        fill_table(Run(), options_for(export.folder))
    assert "tierlog-spark[iceberg]" in caught.value.remedy


def test_the_store_is_reached_as_the_export_is_unless_the_catalog_says_how(configured, tmp_path):
    s3 = S3Settings(endpoint_url="http://127.0.0.1:1", access_key="a", secret_key="s")
    configured(uri=f"sqlite:///{tmp_path}/catalog.db")
    with opened_catalog(None, s3) as catalog:
        found = {key: catalog.properties.get(f"s3.{key}") for key in ("endpoint", "access-key-id")}
        assert found == {"endpoint": "http://127.0.0.1:1", "access-key-id": "a"}
        assert catalog.properties["s3.secret-access-key"] == "s"
    configured(s3__access_key_id="other")
    with opened_catalog(None, s3) as catalog:
        assert catalog.properties["s3.access-key-id"] == "other"
        assert "s3.endpoint" not in catalog.properties
        assert "s3.secret-access-key" not in catalog.properties
