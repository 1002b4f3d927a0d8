"""``tierlog policy …`` over the scheduler's own handlers: what is kept and compared of copies."""

from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from tests.simulation.virtual_loop import run_virtual
from tests.unit.cli.test_offload import over
from tests.unit.offload.world import World
from tests.unit.scheduler.test_scheduler import ENTRIES, scheduler
from tierlog.cli import main, policy
from tierlog.model.ids import NodeId, StreamName
from tierlog.model.partitions import partition_names
from tierlog_scheduler.documents import PolicyDocument
from tierlog_scheduler.policy_api import PolicyApi

PAID = StreamName("shop.paid")


class Direct:
    """A client of a scheduler in the same process."""

    def __init__(self, world: World) -> None:
        self._api = PolicyApi(world.catalog(), scheduler(world))

    async def policy(self, stream: str) -> dict[str, Any]:
        return (await self._api.policy(stream)).model_dump()

    async def change_policy(self, stream: str, wanted: dict[str, Any]) -> dict[str, Any]:
        return (await self._api.change_policy(stream, PolicyDocument(**wanted))).model_dump()

    async def level(self, namespace: str | None) -> dict[str, Any]:
        found = self._api.cluster() if namespace is None else self._api.namespace(namespace)
        return (await found).model_dump()

    async def change_level(self, namespace: str | None, wanted: dict[str, Any]) -> dict[str, Any]:
        given = PolicyDocument(**wanted)
        if namespace is None:
            return (await self._api.change_cluster(given)).model_dump()
        return (await self._api.change_namespace(namespace, given)).model_dump()

    async def explain(self, stream: str) -> dict[str, Any]:
        return (await self._api.explain(stream)).model_dump()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what runs a command, and gives its JSON, or what it says of an error."""
    world = World()
    run_virtual(world.stream(PAID))
    monkeypatch.setattr(policy, "with_client", over(Direct(world)))  # type: ignore[arg-type]

    def run(*words: str) -> Any:
        done = CliRunner().invoke(main.app, ["policy", *words, "-o", "json"])
        return orjson.loads(done.stdout) if not done.exit_code else done.stderr

    return run


def test_levels_of_what_is_kept_and_read_back_are_set_unset_and_explained(told: Any) -> None:
    told("set", "--cluster", "--read-back", "full")
    told("set", "--namespace", "shop", "--data-sha256", "yes", "--read-back", "sample")
    shown = told("set", PAID, "--data-sha256", "no")
    assert (shown["own"]["data_sha256"], shown["own"]["read_back"]) == (False, None)

    def explained() -> dict[str, tuple[Any, str]]:
        found = told("explain", PAID)["thresholds"]
        return {one["name"]: (one["value"], one["level"]) for one in found}

    assert explained()["data_sha256"] == (False, "stream")
    assert explained()["read_back"] == ("sample", "namespace shop")
    told("set", "--namespace", "shop", "--read-back", "none")
    told("set", PAID, "--data-sha256", "none")
    assert explained()["data_sha256"] == (True, "namespace shop")
    assert explained()["read_back"] == ("full", "cluster")
    told("set", "--cluster", "--read-back", "none")
    assert explained()["read_back"] == (None, "settings")


def test_steps_of_a_partitioned_stream_say_of_which_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    names = partition_names(PAID, 2)

    async def made() -> None:
        await world.stream(StreamName("other"))
        streams = world.catalog().streams
        await streams.create(PAID, partitions=2)
        for name in names:
            await world.seal(await streams.claim(name, NodeId("n1")), ENTRIES)

    run_virtual(made())
    monkeypatch.setattr(policy, "with_client", over(Direct(world)))  # type: ignore[arg-type]

    def shown(stream: StreamName) -> str:
        done = CliRunner().invoke(main.app, ["policy", "explain", stream])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert all(shown(PAID).count(one) for one in names)
    assert names[1] not in shown(names[0])
    assert shown(names[0]).count(names[0]) == 1, "it is asked for alone"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--data-sha256", "perhaps", "yes or no"), ("--read-back", "most", "POLICY_INVALID")],
)
def test_other_words_are_refused(told: Any, option: str, value: str, said: str) -> None:
    assert said in told("set", PAID, option, value)
    own = told("show", PAID)["own"]
    assert (own["data_sha256"], own["read_back"]) == (None, None)


@pytest.mark.parametrize("option", ["--ledger-age-max", "--ledger-bytes-max", "--block-size"])
def test_what_each_ledger_has_is_not_never_and_the_remedy_says_how_it_is_written(
    told: Any, option: str
) -> None:
    said = told("set", PAID, option, "never")
    assert "'never' is not an" in said
    assert "Write it as" in said
    assert "below retention" not in said
    assert told("set", PAID, "--ledger-age-max", "10m")["own"]["ledger_age_ms_max"] == 600_000
    shown = told("set", PAID, "--deletion-lag", "never", "--ledger-age-max", "none")["own"]
    assert (shown["deletion_lag_ms"], shown["ledger_age_ms_max"]) == (-1, None)


def test_never_is_minus_one_too_and_a_count_is_set_and_unset(told: Any) -> None:
    limits = ("--deletion-lag", "-1", "--retention-size", "-1", "--ledger-entries-max", "7")
    own = told("set", PAID, *limits)["own"]
    shown = (own["deletion_lag_ms"], own["retention_size_bytes"], own["ledger_entries_max"])
    assert shown == (-1, -1, 7)
    own = told("set", PAID, "--ledger-entries-max", "none")["own"]
    assert (own["deletion_lag_ms"], own["ledger_entries_max"]) == (-1, None), "the others stay"
    for wrong in ("0", "1.5", "-1", "²", "9" * 30):
        assert "a number from 1 on" in told("set", PAID, "--ledger-entries-max", wrong)
    assert "never" in told("set", PAID, "--retention-time", "-2")


def test_a_bound_that_is_below_its_lowest_is_told_of_alone(told: Any) -> None:
    said = told("set", PAID, "--block-size", "1k")
    assert "Give another value for block_size" in said
    assert "retention" not in said
    said = told("set", PAID, "--offload-time", "2d", "--retention-time", "1d")
    assert "Choose offload_time_ms below retention_time_ms" in said
