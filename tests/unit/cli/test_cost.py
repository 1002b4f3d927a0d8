"""``tierlog cost``: sums that can be done by hand, and services that are asked."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierlog.cli import main
from tierlog.client.endpoints import FILE_NAME, EndpointsFile
from tierlog.ports.spending import OTHER_STREAMS
from tierlog.runtime.costs import Cost, Costs
from tierlog.runtime.security import SecuritySettings


def run(*words: str):
    return CliRunner().invoke(main.app, ["cost", *words])


def test_what_if_is_a_sum_that_can_be_done_by_hand(monkeypatch):
    monkeypatch.setenv("TIERLOG_PRICES__READ_PER_1000", "0.4")
    done = run(
        "what-if", "--per-day", "1G", "--ledger", "1G", "--block", "64M", "--range", "1M",
        "--reads", "2", "--kept-days", "10", "-o", "json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = {(row["cause"], row["operation"]): row for row in json.loads(done.stdout)}
    # 30 ledgers a month of 16 blocks; 30 GiB read twice in ranges of a MiB.
    assert rows["offload", "upload_part"]["requests_per_month"] == 480
    assert rows["offload", "complete_multipart_upload"]["requests_per_month"] == 30
    assert rows["read", "get_object"]["requests_per_month"] == 2 * 30 * 1024
    # Four requests verify a copy when it is made, and twelve before the local one goes.
    assert rows["verify", "get_object"]["requests_per_month"] == 30 * (4 + 12)
    # Each of ten ledgers is read once a week, in ranges of 4 MiB; thirty are swept twice.
    assert rows["scrub", "get_object"]["requests_per_month"] == round(30 / 7 * 10 * (4 + 256))
    assert rows["sweep", "list_multipart_uploads"]["requests_per_month"] == 60
    assert {row["currency"] for row in rows.values()} == {"USD"}
    assert "not in it: manifests, attributes" in done.stderr
    price = rows["read", "get_object"]["price_per_month"]
    assert price == pytest.approx(2 * 30 * 1024 / 1000 * 0.4)
    kept = next(row for (cause, _), row in rows.items() if cause == "storage")
    assert kept["price_per_month"] == pytest.approx(10 * 2**30 / 10**9 * 0.023)


def test_what_if_prices_scrubs_and_reading_back_as_the_settings_have_them(monkeypatch):
    monkeypatch.setenv("TIERLOG_PRICES__RECEIVED_PER_GB", "0.09")
    monkeypatch.setenv("TIERLOG_SCHEDULER__SCRUB_INTERVAL_S", "0")
    words = ("what-if", "--per-day", "1GB", "--ledger", "1GB", "--reads", "0", "-o", "json")

    def priced() -> dict[tuple[str, str], float]:
        rows = json.loads(run(*words).stdout)
        return {(row["cause"], row["operation"]): row["price_per_month"] for row in rows}

    before = priced()
    # What is kept, 30 GB (of 2^30 bytes), leaves the store every week.
    assert before["scrub", "get_object"] > 30 / 7 * 30 * 2**30 / 10**9 * 0.09
    monkeypatch.setenv("TIERLOG_SCHEDULER__SCRUB_DEEP_INTERVAL_S", "0")
    monkeypatch.setenv("TIERLOG_S3__READ_BACK", "full")
    after = priced()
    assert sum(price for (cause, _), price in after.items() if cause == "scrub") == 0
    assert (
        after["verify", "get_object"] > 30 * 2**30 / 10**9 * 0.09 > before["verify", "get_object"]
    )


@pytest.mark.parametrize("option", ["--ledger", "--block", "--range"])
def test_sizes_of_nothing_are_refused(option):
    done = run("what-if", "--per-day", "1G", option, "0")
    assert done.exit_code == 2


def test_show_asks_each_service_and_sums(monkeypatch):
    async def fetch(address: str, *, timeout_s: float, security: SecuritySettings) -> Costs:
        assert timeout_s > 0
        assert security.mode is None
        costs = [
            Cost(stream=stream, cause="offload", operation="upload_part", requests=1000,
                 bytes_sent=5, bytes_received=0)
            for stream in ("a", "b")
        ]  # fmt: skip
        return Costs(service=f"service-of-{address}", costs=costs)

    monkeypatch.setattr("tierlog.wiring.costs.fetch_costs", fetch)
    words = ("show", "--service", "one:1", "--service", "two:2", "--stream", "b", "-o", "json")
    done = run(*words)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["stream"], row["requests"]) for row in rows] == [("b", 1000)] * 2
    assert [row["price"] for row in rows] == [pytest.approx(0.005)] * 2
    assert {row["currency"] for row in rows} == {"USD"}


def test_show_says_when_a_stream_may_be_among_those_that_are_not_told_apart(monkeypatch):
    async def fetch(address: str, *, timeout_s: float, security: SecuritySettings) -> Costs:
        del timeout_s, security
        costs = [
            Cost(stream=stream, cause="read", operation="get_object", requests=7,
                 bytes_sent=0, bytes_received=5)
            for stream in ("a", OTHER_STREAMS)
        ]  # fmt: skip
        return Costs(service="reader", costs=costs if address == "many:1" else costs[:1])

    monkeypatch.setattr("tierlog.wiring.costs.fetch_costs", fetch)
    done = run("show", "--service", "few:1", "--service", "many:1", "--stream", "b", "-o", "json")
    assert json.loads(done.stdout) == []
    assert "many:1 counts 7 requests" in done.stderr
    assert "few:1" not in done.stderr
    # One that has a count of its own there is not among them.
    for more in (("--stream", "a"), ()):
        assert "of further streams" not in run("show", "--service", "many:1", *more).stderr


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Return the addresses that are asked, each of which counted nothing."""
    found: list[str] = []

    async def fetch(address: str, *, timeout_s: float, security: SecuritySettings) -> Costs:
        found.append(address)
        return Costs(service="s", costs=[])

    monkeypatch.setattr("tierlog.wiring.costs.fetch_costs", fetch)
    return found


def show(state_dir: Path, *words: str):
    done = CliRunner().invoke(main.app, ["--state-dir", str(state_dir), "cost", "show", *words])
    assert done.exit_code == 0, done.output
    return done


def test_all_services_of_tierlog_up_are_asked_each_ingest_node_too(tmp_path: Path, asked):
    names = ("ingest", "ingest-2", "offloader", "reader", "scheduler")
    written = EndpointsFile(
        pid=1,
        state_dir="",
        services={name: {"http": f"{name}:1", "grpc": f"{name}:2"} for name in names},
    )
    (tmp_path / FILE_NAME).write_text(written.model_dump_json())
    done = show(tmp_path)
    assert sorted(asked) == sorted(f"{name}:1" for name in names)
    assert "Not asked" not in done.stderr


def test_what_is_left_out_of_the_sum_is_named(tmp_path: Path, asked, monkeypatch):
    monkeypatch.setenv("TIERLOG_CLIENT__READER_HTTP_ADDRESS", "r:1")
    done = show(tmp_path, "-o", "json")
    assert asked == ["r:1"]
    assert "Not asked, and not in the sum: ingest, offloader, scheduler." in done.stderr
    assert "--service" in done.stderr
    assert json.loads(done.stdout) == []
    monkeypatch.setenv("TIERLOG_CLIENT__SCHEDULER_HTTP_ADDRESS", "s:1")
    assert "in the sum: ingest, offloader." in show(tmp_path).stderr
    # Who names services has chosen.
    assert "Not asked" not in show(tmp_path, "--service", "o:1").stderr


def test_without_services_it_says_where_they_come_from(tmp_path: Path):
    done = CliRunner().invoke(main.app, ["--state-dir", str(tmp_path), "cost", "show"])
    assert done.exit_code == 2
