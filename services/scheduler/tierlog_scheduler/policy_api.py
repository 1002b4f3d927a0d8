"""Thresholds over REST: of streams, of namespaces, of the cluster; what comes of them; deletion.

Any scheduler answers. What the leader alone knows, when it first saw a copy complete, others take
from its last checkpoint: their times may be that much too long.
"""

from collections.abc import Callable, Sequence

from fastapi import FastAPI

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import StreamName, namespace_of, stream_name
from tierlog.model.policy import Policy, check_namespace
from tierlog_scheduler.actions import Memory
from tierlog_scheduler.api import read_all
from tierlog_scheduler.documents import (
    DeletionAnswer,
    ExplainAnswer,
    LevelAnswer,
    LevelsAnswer,
    PolicyAnswer,
    PolicyDocument,
    StepDocument,
    ThresholdDocument,
)
from tierlog_scheduler.explain import explain
from tierlog_scheduler.policy import StreamView, offload_lag
from tierlog_scheduler.scheduler import Scheduler


class PolicyApi:
    """The handlers, over the catalog and a scheduler."""

    def __init__(self, catalog: Catalog, scheduler: Scheduler) -> None:
        self._catalog = catalog
        self._scheduler = scheduler

    def add_routes(self, app: FastAPI) -> None:
        """Add the API to ``app``."""
        stream, namespace = "/v1/streams/{name}", "/v1/policies/namespaces/{namespace}"
        app.add_api_route(f"{stream}/policy", self.policy, methods=["GET"])
        app.add_api_route(f"{stream}/policy", self.set_policy, methods=["PUT"])
        app.add_api_route(f"{stream}/policy", self.change_policy, methods=["PATCH"])
        app.add_api_route(f"{stream}/policy/explain", self.explain, methods=["GET"])
        app.add_api_route(stream, self.delete, methods=["DELETE"], status_code=202)
        app.add_api_route("/v1/policies", self.levels, methods=["GET"])
        app.add_api_route("/v1/policies/cluster", self.cluster, methods=["GET"])
        app.add_api_route("/v1/policies/cluster", self.set_cluster, methods=["PUT"])
        app.add_api_route("/v1/policies/cluster", self.change_cluster, methods=["PATCH"])
        app.add_api_route(namespace, self.namespace, methods=["GET"])
        app.add_api_route(namespace, self.set_namespace, methods=["PUT"])
        app.add_api_route(namespace, self.change_namespace, methods=["PATCH"])

    async def policy(self, name: str) -> PolicyAnswer:
        """Show a stream's thresholds, what holds with the levels above, and which level says so."""
        return _answer(await self._catalog.streams.snapshot(stream_name(name)))

    async def set_policy(self, name: str, wanted: PolicyDocument) -> PolicyAnswer:
        """Replace a stream's own thresholds; those that don't fit together are refused."""
        policy = wanted.policy()
        return await self._change(stream_name(name), lambda _: policy)

    async def change_policy(self, name: str, wanted: PolicyDocument) -> PolicyAnswer:
        """Change those of a stream's own thresholds that are given; null unsets one."""
        return await self._change(stream_name(name), wanted.onto)

    async def _change(self, name: StreamName, change: Callable[[Policy], Policy]) -> PolicyAnswer:
        found = (await self._catalog.streams.snapshot(name)).stream
        for one in await self._catalog.streams.partitions(found):
            await self._catalog.streams.change_policy(one, change)
        await self._catalog.streams.change_policy(found.name, change)
        return _answer(await self._catalog.streams.snapshot(found.name))

    async def explain(self, name: str) -> ExplainAnswer:
        """Say which level gives each threshold, and what happens next to each ledger, and when.

        Of a stream with partitions: to the ledgers of each of them.
        """
        memory, now = await self._scheduler.remembered()
        snapshot, own = await self._scheduler.look_at(stream_name(name), memory)
        stream, answer = snapshot.stream, _answer(snapshot)
        partitions = await self._catalog.streams.partitions(stream)
        views = {stream.name: own, **await self._views(partitions, memory)}
        effective = answer.effective.model_dump()
        return ExplainAnswer(
            stream=stream.name,
            namespace=namespace_of(stream.name),
            paused=any(one.paused for one in views.values()),
            deletions_stopped=_told(self._scheduler.deletions_stopped, stream.name, [*views]),
            unexpected_error=_told(self._scheduler.defect, stream.name, [*views]),
            oldest_byte_age_ms=max(offload_lag(one, now).age_ms for one in views.values()),
            thresholds=[
                ThresholdDocument(name=key, value=effective[key], level=level)
                for key, level in answer.levels.items()
            ],
            ledgers=[
                StepDocument(
                    stream=one,
                    ledger_id=step.ledger_id,
                    what=step.what.value,
                    in_ms=step.in_ms,
                    at_ms=None if step.in_ms is None else now.wall_ms + step.in_ms,
                    why=step.why,
                )
                for one, view in views.items()
                for step in explain(view, now, self._scheduler.delays)
            ],
        )

    async def _views(
        self, partitions: Sequence[StreamName], memory: Memory
    ) -> dict[StreamName, StreamView]:
        """Return what decisions see of those partitions that are there."""

        async def look(name: StreamName) -> StreamView | None:
            try:
                return (await self._scheduler.look_at(name, memory))[1]
            except RefusedError as error:
                if error.reason is not Reason.STREAM_NOT_FOUND:
                    raise
                return None

        found = await read_all(look, partitions)
        return {
            name: view for name, view in zip(partitions, found, strict=True) if view is not None
        }

    async def levels(self) -> LevelsAnswer:
        """Show what the cluster and its namespaces say."""
        found = await self._catalog.policies.levels()
        return LevelsAnswer(
            cluster=PolicyDocument.of(found.cluster),
            namespaces={key: PolicyDocument.of(one) for key, one in found.namespaces.items()},
        )

    async def cluster(self) -> LevelAnswer:
        """Show the cluster's thresholds."""
        return await self._level(None)

    async def set_cluster(self, wanted: PolicyDocument) -> LevelAnswer:
        """Replace the cluster's thresholds; refused where a stream below would break."""
        await self._catalog.policies.set_level(None, wanted.policy())
        return await self._level(None)

    async def change_cluster(self, wanted: PolicyDocument) -> LevelAnswer:
        """Change those of the cluster's thresholds that are given; null unsets one."""
        await self._catalog.policies.change_level(None, wanted.onto)
        return await self._level(None)

    async def namespace(self, namespace: str) -> LevelAnswer:
        """Show a namespace's thresholds; one that says nothing has none."""
        return await self._level(check_namespace(namespace))

    async def set_namespace(self, namespace: str, wanted: PolicyDocument) -> LevelAnswer:
        """Replace a namespace's thresholds; refused where a stream below would break."""
        await self._catalog.policies.set_level(check_namespace(namespace), wanted.policy())
        return await self._level(namespace)

    async def change_namespace(self, namespace: str, wanted: PolicyDocument) -> LevelAnswer:
        """Change those of a namespace's thresholds that are given; null unsets one."""
        await self._catalog.policies.change_level(check_namespace(namespace), wanted.onto)
        return await self._level(namespace)

    async def delete(self, name: str) -> DeletionAnswer:
        """Delete a stream with all that it has, in both tiers; its name is free once that is done.

        The ledgers go step by step, as they do by retention; asking again shows what is left.
        """
        found = (await self._catalog.streams.snapshot(stream_name(name))).stream
        begun = []
        for one in await self._catalog.streams.partitions(found):
            try:
                begun.append(await self._delete(one))
            except RefusedError as error:
                # One that is gone already is what is wanted; of any other the rest stays, too.
                if error.reason is not Reason.STREAM_NOT_FOUND:
                    raise
        begun.append(await self._delete(found.name))
        return DeletionAnswer(
            stream=found.name,
            incarnation=str(found.incarnation),
            ledgers_left=sum(len(one.ledgers) + len(one.stream.deleting) for one in begun),
            paused=any(one.stream.offload_pause is not None for one in begun),
        )

    async def _delete(self, name: StreamName) -> StreamSnapshot:
        """Begin to delete a stream; return what is left of it."""
        await self._catalog.retention.begin_stream_deletion(name)
        return await self._catalog.streams.snapshot(name)

    async def _level(self, namespace: str | None) -> LevelAnswer:
        levels = await self._catalog.policies.levels()
        below = StreamName("x" if namespace is None else f"{namespace}.x")
        return LevelAnswer(
            namespace=namespace,
            own=PolicyDocument.of(levels.level(namespace)),
            effective=PolicyDocument.of(levels.effective(below, Policy())),
        )


def _answer(snapshot: StreamSnapshot) -> PolicyAnswer:
    stream, levels = snapshot.stream, snapshot.levels
    return PolicyAnswer(
        own=PolicyDocument.of(stream.policy),
        effective=PolicyDocument.of(snapshot.policy),
        levels=levels.sources(stream.name, stream.policy),
    )


def _told(
    say: Callable[[StreamName], str | None], stream: StreamName, names: Sequence[StreamName]
) -> str | None:
    """Return what is said of the first of some streams of which something is."""
    found = [(name, text) for name in names if (text := say(name)) is not None]
    if not found:
        return None
    name, text = found[0]
    others = f"; and of {len(found) - 1} more" if len(found) > 1 else ""
    return f"{text if name == stream else f'{name}: {text}'}{others}"
