"""A gate that lets every deletion through, and a leader with it: for tests not about manifests."""

from collections.abc import Mapping
from uuid import UUID

from tests.unit.offload.world import World
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadContext
from tierlog.model.position import Position
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits


class OpenGate:
    """``ManifestGate`` as if each manifest were written at once. ``shut`` keeps everything."""

    def __init__(self) -> None:
        self.shut = False
        self.recorded: list[tuple[StreamName, frozenset[LedgerId]]] = []

    def begin_pass(self) -> None:
        pass

    def begin_term(self) -> None:
        pass

    def forget(self, name: StreamName) -> None:
        del name

    async def look(self, name: StreamName, *, compare: bool = False) -> bool:
        del name, compare
        return False

    async def record(
        self, snapshot: StreamSnapshot, contexts: Mapping[LedgerId, OffloadContext]
    ) -> None:
        self.recorded.append((snapshot.stream.name, frozenset(contexts)))

    async def may_delete_local(self, context: OffloadContext) -> bool:
        del context
        return not self.shut

    async def may_sweep(self, context: OffloadContext, uuid: UUID) -> bool:
        del context, uuid
        return not self.shut

    async def let_go(self, name: StreamName, incarnation: UUID, ledger_id: LedgerId) -> bool:
        del name, incarnation, ledger_id
        return not self.shut

    async def record_cluster(self, *, compare: bool = False) -> None:
        del compare

    def attributes_through(self, name: StreamName) -> Position | None:
        del name
        return None

    def stopped(self, name: StreamName) -> str | None:
        del name
        return "shut" if self.shut else None

    def reads_again(self, name: StreamName) -> bool:
        del name
        return self.shut

    def stopped_streams(self) -> Mapping[str, int]:
        return {"shut": int(self.shut)}


def leader_of(world: World, limits: SchedulerLimits) -> Scheduler:
    """Return a scheduler of the world's streams, whose term has not begun."""
    return Scheduler(
        catalog=world.catalog(),
        offloader=world.offloader(),
        publisher=world.queue.publisher(None),
        stationery=world.stationery,
        manifests=OpenGate(),
        clock=world.clock,
        ids=world.ids,
        limits=limits,
    )
