"""A bare ledger that is open is read as far as it was told to be acknowledged, or that is told."""

# mypy: disable-error-code="no-untyped-call"

import asyncio
from unittest import mock

import pytest

from tests.unit.client.test_ledgers import THREE, on_three_nodes, outcome
from tierlog.model.errors import Reason


@pytest.mark.parametrize("goes", [True, False])
def test_a_read_is_not_short_of_what_it_was_told_to_be_acknowledged(goes):
    """The node that said so may go, and those who are left know of less."""

    @on_three_nodes
    async def test(cluster, ledgers):
        ledger = await ledgers.create(THREE)
        await ledger.append(b"one")
        await asyncio.sleep(0.1)
        for node in cluster.nodes.values():
            node.mute = True
        await ledger.send(b"two")
        await asyncio.sleep(0.1)
        cluster.nodes["n1"].confirm(ledger.ledger_id, 1)
        reader, found = await ledgers.open(ledger.ledger_id), []
        ask = reader.last_add_confirmed

        async def told():
            try:
                return await ask()
            finally:
                cluster.nodes["n1"].down |= goes

        async def read_all():
            found.extend([one.data async for one in reader.entries()])

        with mock.patch.object(reader, "last_add_confirmed", told):
            error = await outcome(read_all())
        assert (found, error) == ([b"one", b"two"], None) or (
            goes and error.reason is Reason.NOT_YET
        )

    test()
