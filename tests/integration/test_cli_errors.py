"""Bad input, and what it gets: a reason, a remedy, the right exit code, and no stack trace."""

import asyncio

import pytest

pytestmark = [pytest.mark.integration]


REFUSED_NAMES = ["bad name", "-dash", ".dot", "a/b", "ü", "x" * 129, ""]


@pytest.mark.parametrize("name", REFUSED_NAMES)
async def test_stream_names(cli, cluster, name):
    for arguments in (("append", "--", name), ("read", "--", name), ("stream", "show", "--", name)):
        done = await cli(*arguments, state_dir=cluster.state_dir)
        done.check(2, "is not allowed", "remedy:")


@pytest.mark.parametrize("text", ["x", "1", "1:", "1:-2", "1:2:3", "99999999999999999999:0"])
async def test_positions_that_are_none(cli, cluster, text):
    done = await cli("read", "any", "--from", text, state_dir=cluster.state_dir)
    done.check(2, "is not a position", "LEDGER:ENTRY")


async def test_positions_that_do_not_exist(cli, cluster):
    state = cluster.state_dir
    (await cli("append", "cli-places", stdin=b"one\n", state_dir=state)).check(0)
    (await cli("stream", "seal", "cli-places", state_dir=state)).check(0)
    shown = (await cli("ledger", "ls", "cli-places", "-o", "jsonl", state_dir=state)).check(0)
    ledger_id = shown.stdout.split(b'"ledger_id":')[1].split(b",")[0].decode()
    done = await cli("read", "cli-places", "--from", f"{ledger_id}:5", state_dir=state)
    done.check(3, "NO_SUCH_ENTRY", "remedy:")
    done = await cli("read", "cli-places", "--from", "888888:0", state_dir=state)
    done.check(3, "LEDGER_NOT_FOUND", "ledger ls")


async def test_what_is_not_found(cli, cluster):
    state = cluster.state_dir
    (await cli("read", "no-such", state_dir=state)).check(3, "STREAM_NOT_FOUND")
    (await cli("stream", "create", "cli-empty", state_dir=state)).check(0)
    empty = ("read", "cli-empty", "-o", "json")
    assert (await cli(*empty, state_dir=state)).check(0).stdout == b"[]\n"
    done = await cli(*empty, "--from", "888888:0", state_dir=state)
    done.check(3, "LEDGER_NOT_FOUND", "remedy:")
    (await cli("stream", "show", "no-such", state_dir=state)).check(3, "STREAM_NOT_FOUND")
    (await cli("ledger", "ls", "no-such", state_dir=state)).check(3, "STREAM_NOT_FOUND")
    (await cli("ledger", "show", "999999", state_dir=state)).check(3, "LEDGER_NOT_FOUND")
    (await cli("offload", "run", "no-such", state_dir=state)).check(3, "STREAM_NOT_FOUND")
    (await cli("offload", "status", "no-such", state_dir=state)).check(3, "STREAM_NOT_FOUND")
    (await cli("policy", "show", "no-such", state_dir=state)).check(3, "STREAM_NOT_FOUND")
    missing = "s3://cluster/no-such-key"
    (await cli("object", "inspect", missing, state_dir=state)).check(3, "there is no object")
    (await cli("object", "inspect", "/no/such/file", state_dir=state)).check(3, "can't be read")
    (await cli("append", "x", "/no/such/file", state_dir=state)).check(2, "can't be read")


@pytest.mark.covers("A36", "A38")
async def test_thresholds_that_break_offload_below_retention(cli, cluster):
    state = cluster.state_dir
    (await cli("stream", "create", "cli-policy", state_dir=state)).check(0)
    for kind, offload, retention in (("size", "10M", "10M"), ("time", "2h", "1h")):
        done = await cli(
            *("policy", "set", "cli-policy"),
            *(f"--offload-{kind}", offload, f"--retention-{kind}", retention),
            state_dir=state,
        )
        done.check(2, "POLICY_INVALID", f"offload_{kind}", "remedy:")
    done = await cli("policy", "set", "cli-policy", "--block-size", "1M", state_dir=state)
    done.check(2, "POLICY_INVALID", "block_size")
    done = await cli("policy", "set", "cli-policy", "--offload-time", "soon", state_dir=state)
    done.check(2, "is not")
    (await cli("policy", "set", "cli-policy", state_dir=state)).check(2, "no threshold")
    shown = (await cli("policy", "show", "cli-policy", "-o", "json", state_dir=state)).check(0)
    assert b'"retention_size_bytes": null' in shown.stdout, "nothing half-done"


@pytest.mark.covers("A34", "A35", "A37")
async def test_thresholds_of_a_namespace_and_what_comes_of_them(cli, cluster):
    state, stream = cluster.state_dir, "clins.one"

    async def run(*words: str):
        return await cli(*words, state_dir=state)

    (await run("stream", "create", stream)).check(0)
    above = ("policy", "set", "--namespace", "clins")
    (await run(*above, "--offloadTimeInMinutes", "300", "--retention-size", "never")).check(0)
    explained = (await run("policy", "explain", stream, "-o", "json")).check(0)
    assert b'"level": "namespace clins"' in explained.stdout
    assert b'"value": 18000000' in explained.stdout
    (await run("policy", "explain", stream)).check(0)
    (await run("policy", "set", stream, "--data-sha256", "yes", "--read-back", "full")).check(0)
    explained = (await run("policy", "explain", stream, "-o", "jsonl")).check(0)
    for said in (b'"name":"data_sha256","value":true', b'"name":"read_back","value":"full"'):
        assert said + b',"level":"stream"' in explained.stdout
    (await run("policy", "set", stream, "--data-sha256", "none")).check(0)
    shown = (await run("policy", "show", stream, "-o", "jsonl")).check(0)
    assert b'"data_sha256":null,"read_back":"full"' in shown.stdout
    (await run("policy", "set", stream, "--data-sha256", "perhaps")).check(2, "yes or no")
    (await run("policy", "set", stream, "--read-back", "most")).check(2, "POLICY_INVALID")
    shown = (await run("policy", "show", "--namespace", "clins")).check(0)
    assert b"18000000" in shown.stdout
    (await run("policy", "show", "--cluster", "-o", "json")).check(0)
    (await run("policy", "set", stream, "--offload-size", "10G")).check(0)
    done = await run(*above, "--retentionSizeInMB", "1")
    done.check(2, "POLICY_INVALID", f"stream {stream}", "remedy:")
    for wrong in (
        ("policy", "show"),
        ("policy", "show", stream, "--cluster"),
        ("policy", "set", stream, "--offload-time", "1m", "--offloadTimeInMinutes", "1"),
        ("policy", "set", "--namespace", "a.b", "--offload-time", "1m"),
    ):
        (await run(*wrong)).check(2, "remedy:")
    (await run(*above, "--offload-time", "none", "--retention-size", "none")).check(0)


async def test_a_stream_is_deleted_only_when_it_is_meant(cli, cluster):
    state, stream = cluster.state_dir, "cli-gone"
    (await cli("append", stream, stdin=b"one\ntwo\n", state_dir=state)).check(0)
    (await cli("stream", "delete", stream, state_dir=state)).check(2, "--yes")
    (await cli("stream", "show", stream, state_dir=state)).check(0)
    (await cli("stream", "delete", stream, "--yes", state_dir=state)).check(0)
    async with asyncio.timeout(60):
        while (await cli("stream", "show", stream, state_dir=state)).code == 0:
            await asyncio.sleep(0.5)
    (await cli("append", stream, stdin=b"anew\n", state_dir=state)).check(0)


async def test_an_entry_that_could_not_be_offloaded_is_refused_at_once(cli, cluster):
    state = cluster.state_dir
    (await cli("stream", "create", "cli-large", state_dir=state)).check(0)
    (await cli("policy", "set", "cli-large", "--block-size", "5M", state_dir=state)).check(0)
    large = b"x" * (6 * 1024 * 1024)
    done = await cli("append", "cli-large", stdin=b"small\n" + large, state_dir=state)
    done.check(2, "TOO_LARGE", "remedy:")


async def test_bad_lines_keep_what_came_before_them(cli, cluster):
    state = cluster.state_dir
    done = await cli(
        "append", "cli-lines", "-f", "ndjson", stdin=b'{"a":1}\n{"b":2}\nnope\n', state_dir=state
    )
    done.check(2, "line 3 is not JSON", "The 2 events before it are appended")
    found = (await cli("read", "cli-lines", state_dir=state)).check(0)
    assert found.stdout == b'{"a":1}\n{"b":2}\n'


async def test_services_that_are_not_there(cli, tmp_path):
    (await cli("read", "any", state_dir=tmp_path)).check(5, "tierlog up")
    nowhere = {
        "TIERLOG_CLIENT__INGEST_ADDRESS": "127.0.0.1:1",
        "TIERLOG_CLIENT__READER_HTTP_ADDRESS": "127.0.0.1:1",
        "TIERLOG_CLIENT__SCHEDULER_HTTP_ADDRESS": "127.0.0.1:1",
        "TIERLOG_CLIENT__TIMEOUT_S": "1",
    }
    for arguments in (("read", "any"), ("append", "any"), ("stream", "ls")):
        done = await cli(*arguments, stdin=b"x\n", state_dir=tmp_path, **nowhere)
        done.check(5, "remedy:")


async def test_settings_that_are_wrong(cli, tmp_path):
    done = await cli("read", "any", state_dir=tmp_path, TIERLOG_CLIENT__TIMEOUT_S="soon")
    done.check(2, "client.timeout_s", "TIERLOG_CLIENT__TIMEOUT_S")
    done = await cli("read", "any", state_dir=tmp_path, TIERLOG_CONFIG="/no/such.toml")
    done.check(2, "TIERLOG_CONFIG")
    (tmp_path / "endpoints.json").write_text("{}")
    (await cli("read", "any", state_dir=tmp_path)).check(2, "endpoints.json")


async def test_usage(cli, tmp_path):
    (await cli("nope", state_dir=tmp_path)).check(2)
    (await cli("read", state_dir=tmp_path)).check(2)
    (await cli("read", "x", "-o", "xml", state_dir=tmp_path)).check(2)
    (await cli("read", "x", "--follow", "-o", "table", state_dir=tmp_path)).check(2, "-o jsonl")
    (await cli("--help", state_dir=tmp_path)).check(0)
