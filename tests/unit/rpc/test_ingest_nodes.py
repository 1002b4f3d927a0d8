"""A client asks any ingest node, follows to the owner, and goes on where one is away."""

# Controls here have what the search needs, and no more.
# mypy: disable-error-code="arg-type,union-attr"

import asyncio
import uuid

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.adapters.rpc.ingest_nodes import (
    CREATE_HEDGE_S,
    HEDGE_S,
    IngestNodes,
    split_addresses,
)
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import NodeId, StreamName
from tierlog.ports.streams import OwnerInfo

LOGS = StreamName("logs")
CLUSTER = uuid.UUID(int=1)
SILENT = "silent"
AWAY = "away"


def owner_at(address: str) -> OwnerInfo:
    return OwnerInfo(
        node_id=NodeId(address),
        wire_address=f"{address}-wire",
        grpc_address=address,
        http_address=f"{address}-http",
        owner_epoch=1,
        cluster_id=CLUSTER,
    )


class Nodes:
    """Nodes by address: each names an address as the owner's, is silent, away, or refuses."""

    def __init__(self, **says):
        self.says = says
        self.asked = []
        self.created = []
        self.cut_off = set()
        self.hang = set()
        self.open = 0

    def connect(self, *addresses, **more):
        return IngestNodes(addresses, lambda address: Node(self, address), **more)


class Node:
    def __init__(self, nodes, address):
        self.nodes, self.address = nodes, address

    async def _say(self):
        says = self.nodes.says[self.address]
        if says == SILENT:
            self.nodes.open += 1
            try:
                await asyncio.sleep(1000)
            finally:
                self.nodes.open -= 1
        if says == AWAY:
            raise RetryableError(f"{self.address} is away", remedy="wait")
        if isinstance(says, Exception):
            raise says
        return says

    async def find_owner(self, stream):
        self.nodes.asked.append(self.address)
        return owner_at(await self._say())

    async def seal(self, stream):
        return f"sealed at {self.address}"

    async def get_attributes(self, stream, keys):
        raise NotImplementedError

    async def list_attributes(self, stream, *, first=b"", last=b"", limit=1):
        raise NotImplementedError

    async def create_stream(self, stream, **shape):
        self.nodes.created.append(self.address)
        if self.address in self.nodes.hang:
            await asyncio.sleep(1000)
        if self.address in self.nodes.cut_off:
            raise RetryableError(f"{self.address} does not reach the metadata", remedy="wait")
        return f"created at {self.address}"

    async def answers(self):
        try:
            await self._say()
        except RetryableError:
            return False
        return True

    async def close(self):
        self.nodes.open -= 100


@on_virtual_time
async def test_the_owner_is_found_by_way_of_any_node_and_asked_itself():
    nodes = Nodes(a="b", b="b", c="b")
    control = nodes.connect("a", "c")
    assert (await control.find_owner(LOGS)).node_id == "b"
    assert nodes.asked == ["a", "b"]
    # From now on it is asked first.
    assert (await control.find_owner(LOGS)).node_id == "b"
    assert nodes.asked == ["a", "b", "b"]
    assert await control.seal(LOGS) == "sealed at b"


@pytest.mark.parametrize("trouble", [SILENT, AWAY])
def test_a_node_that_gives_no_answer_is_passed_over(trouble):
    @on_virtual_time
    async def test():
        loop = asyncio.get_running_loop()
        nodes = Nodes(a=trouble, b=trouble, c="c")
        control = nodes.connect("a", "b", "c")
        begun_s = loop.time()
        assert (await control.find_owner(LOGS)).node_id == "c"
        assert loop.time() - begun_s <= 2 * HEDGE_S
        assert nodes.open == 0, "no call is left behind"
        assert await control.create_stream(LOGS, raw=True, policy=None, exist_ok=False)
        nodes.says["c"] = AWAY
        nodes.says["a"] = "a"
        assert (await control.find_owner(LOGS)).node_id == "a"
        await control.close()

    test()


@on_virtual_time
async def test_a_stream_is_created_on_a_node_that_answers():
    nodes = Nodes(a=SILENT, b=AWAY, c="c")
    control = nodes.connect("a", "b", "c")
    shape = {"raw": True, "policy": None, "exist_ok": False}
    assert await control.create_stream(LOGS, **shape) == "created at c"
    assert await nodes.connect("a").create_stream(LOGS, **shape) == "created at a"


@on_virtual_time
async def test_a_node_that_answers_and_can_create_nothing_is_passed_over():
    nodes = Nodes(a="a", b="b", c="c")
    nodes.cut_off = {"a", "b"}
    control = nodes.connect("a", "b", "c")
    shape = {"raw": True, "policy": None, "exist_ok": True}
    assert await control.create_stream(LOGS, **shape) == "created at c"
    # And not asked first again.
    assert await control.create_stream(LOGS, **shape) == "created at c"
    assert nodes.created == ["a", "b", "c", "c"]
    nodes.cut_off.add("c")
    with pytest.raises(RetryableError, match="does not reach"):
        await control.create_stream(LOGS, **shape)
    assert sorted(nodes.created[4:]) == ["a", "b", "c"], "each once"


@on_virtual_time
async def test_a_node_that_is_silent_when_a_stream_is_to_be_there_is_not_waited_for():
    nodes = Nodes(a="a", b="b")
    nodes.hang = {"a"}
    control = nodes.connect("a", "b")
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    shape = {"raw": True, "policy": None}
    assert await control.create_stream(LOGS, **shape, exist_ok=True) == "created at b"
    assert loop.time() - begun_s <= CREATE_HEDGE_S
    assert nodes.created == ["a", "b"]
    # Where it must not be there yet, nobody else is asked: the first may have created it.
    async with asyncio.TaskGroup() as tasks:
        nodes.hang = {"b"}
        creating = tasks.create_task(control.create_stream(LOGS, **shape, exist_ok=False))
        await asyncio.sleep(100)
        assert nodes.created == ["a", "b", "b"]
        creating.cancel()


@on_virtual_time
async def test_an_owner_that_is_slow_to_recover_is_waited_for_while_others_name_it():
    nodes = Nodes(a="b", b=SILENT, c="b")
    control = nodes.connect("a", "c")
    async with asyncio.TaskGroup() as tasks:
        finding = tasks.create_task(control.find_owner(LOGS))
        await asyncio.sleep(100)
        assert not finding.done()
        assert sorted(nodes.asked) == ["a", "b", "c"]
        finding.cancel()
    assert nodes.open == 0


@on_virtual_time
async def test_a_refusal_is_the_answer():
    missing = RefusedError("no such stream", reason=Reason.STREAM_NOT_FOUND, remedy="create it")
    nodes = Nodes(a=missing, b="b")
    with pytest.raises(RefusedError) as caught:
        await nodes.connect("a", "b").find_owner(LOGS)
    assert caught.value.reason is Reason.STREAM_NOT_FOUND
    assert nodes.asked == ["a"]


@on_virtual_time
async def test_nodes_that_name_each_other_or_are_all_away_are_a_reason_to_ask_again():
    with pytest.raises(RetryableError, match="do not agree"):
        await Nodes(a="b", b="a").connect("a").find_owner(LOGS)
    with pytest.raises(RetryableError, match="b is away"):
        await Nodes(a=AWAY, b=AWAY).connect("a", "b").find_owner(LOGS)


@on_virtual_time
async def test_a_client_without_any_address_says_how_to_give_one():
    control = Nodes().connect()
    for call in (control.find_owner(LOGS), control.seal(LOGS)):
        with pytest.raises(RefusedError, match="INGEST_ADDRESS"):
            await call


@on_virtual_time
async def test_nodes_that_were_named_are_asked_when_the_given_one_is_gone():
    nodes = Nodes(a="b", b="b", c="c")
    control = nodes.connect("a")
    await control.find_owner(LOGS)
    nodes.says |= {"a": AWAY, "b": "c"}
    assert (await control.find_owner(LOGS)).node_id == "c"


def test_addresses_stand_between_commas():
    assert split_addresses("a:1, b:2,,c:3 ") == ["a:1", "b:2", "c:3"]
    assert split_addresses("") == []
