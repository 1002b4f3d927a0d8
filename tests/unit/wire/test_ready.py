"""Who waits before a node takes more: producers for its appends, owners for its storage alone."""

import asyncio

from tests.unit.wire.test_connection import Handler, make_draft, make_run, served, virtual
from tierlog.model.ids import StreamName
from tierlog.wire.messages import ROLE_OWNER, ROLE_PRODUCER


@virtual
async def test_a_node_whose_producers_wait_takes_the_runs_of_others():
    """Else nodes whose appends wait for each other would wait for good."""
    handler = Handler()
    async with served(handler) as connect:
        producer, owner = await connect(ROLE_PRODUCER), await connect(ROLE_OWNER)
        handler.open_for_appends.clear()
        async with asyncio.timeout(5):
            for add in [owner.add(make_run(n)) for n in range(4)]:
                await add
        # One was let in before; it is the next that waits.
        await producer.append(StreamName("s"), make_draft(), deadline_s=2)
        waiting = asyncio.ensure_future(
            producer.append(StreamName("s"), make_draft(), deadline_s=60)
        )
        await asyncio.sleep(1)
        assert len([one for one in handler.seen if one[0] == "s"]) == 1
        handler.open_for_appends.set()
        await waiting
        await producer.close()
        await owner.close()
