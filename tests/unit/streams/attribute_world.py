"""Owners that keep attributes, over memory; and entries that change them."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib
from uuid import UUID

from tests.unit.ledger.small_cluster import STREAM, SmallCluster, draft
from tests.unit.streams.test_owners import ONE, make_owners, running
from tierlog.adapters.memory.attributes import MemoryAttributes
from tierlog.adapters.memory.faults import no_faults
from tierlog.format.attribute_changes import change_in_stream, replayed
from tierlog.format.entry import AttributeUpdate, Verb, encode_entry
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.attributes import (
    CREATION_TIME,
    EVENT_COUNT,
    AppendCondition,
    AttributeKey,
)
from tierlog.model.core_attributes import DERIVED
from tierlog.model.policy import Policy
from tierlog.runtime.sections import AttributeSettings
from tierlog_ingest.streams.attributes.crowd import Crowd
from tierlog_ingest.streams.attributes.keeper import AttributeParts

W1, W2 = UUID(int=1 << 100), UUID(int=2 << 100)
KEY = UUID(int=7 << 90)
CACHED_MAX = 20


def key_of(one):
    return AttributeKey(one.bytes)


def entry(writer, number, *, events=1, updates=()):
    """Return an entry of ``events`` events of a writer."""
    payloads = [b"%d.%d" % (number, event) for event in range(events)]
    return encode_entry(
        payloads,
        publish_time_ms=1,
        writer_id=writer,
        event_number=number,
        attribute_updates=updates,
    )


def update(verb, value, *, key=KEY, expected=0):
    return AttributeUpdate(key=key, verb=verb, value=value, expected=expected)


def after(number, where=None):
    return AppendCondition(last_event_number=number, after=where)


def plus(value):
    return update(Verb.ACCUMULATE, value)


class AttributeCluster(SmallCluster):
    """A small cluster whose owners share one index of attributes."""

    def __init__(self, count=1, *, seed=1, **settings):
        super().__init__(count, seed=seed)
        self.index = MemoryAttributes()
        self.settings = AttributeSettings(**settings)

    def owners(
        self,
        name="n1",
        *,
        faults=None,
        catalog=None,
        settings=ONE,
        open_ledger=None,
        open_copy=None,
    ):
        catalog = catalog or self.catalog()
        directory = self.directory(catalog)

        async def open_tier1(ledger_id):
            return Tier1ReadHandle(ledger_id, await catalog.ledgers.get(ledger_id), directory)

        parts = AttributeParts(
            index=self.index.connect(faults or no_faults()),
            open_ledger=open_ledger or open_tier1,
            open_copy=open_copy,
            settings=self.settings,
            crowd=Crowd(self.settings.unflushed_all_max),
        )
        return make_owners(self, name, catalog=catalog, settings=settings, attributes=parts)


@contextlib.asynccontextmanager
async def one_owner(*, policy=None, faults=None, **settings):
    """Give a cluster of one node, and what owns streams there; it is drained at the end."""
    cluster = AttributeCluster(**settings)
    await cluster.start(policy=policy)
    owners = cluster.owners(faults=faults)
    async with running(owners):
        yield cluster, owners


@contextlib.asynccontextmanager
async def many_writers():
    """Give owners, writers with an event each, most of them in tier 2 alone, and its faults."""
    faults = no_faults()
    policy = Policy(ledger_entries_max=50)
    settings = {"cached_max": CACHED_MAX, "checkpoint_updates": 1}
    async with one_owner(policy=policy, faults=faults, **settings) as (_, owners):
        writers = [UUID(int=(number + 1) << 100) for number in range(3 * CACHED_MAX)]
        for writer in writers:
            await send(owners, STREAM, writer, 1)
            await asyncio.sleep(0.01)
        yield owners, writers, faults


def send(owners, stream, writer, number, *, last=None, events=1, updates=(), where=None):
    """Submit a conditional append; its answer."""
    last = number - events if last is None else last
    return owners.submit(
        stream,
        draft(entry(writer, number, events=events, updates=updates)),
        condition=after(last, where),
    )


def made_by_entries(values):
    """Return attributes but for those that no entry changes."""
    return {key: values[key] for key in values if key not in DERIVED | {CREATION_TIME}}


def folded(entries):
    """Return what entries make of attributes, one after the other."""
    found = {EVENT_COUNT: 0}
    for change in map(change_in_stream, entries):
        if change is not None:
            found[EVENT_COUNT] += change.event_count
            found |= replayed(change, found.get)
    return found
