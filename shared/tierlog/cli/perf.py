"""``tierlog perf …``: loads a stream through the client, and tells how fast it was.

    write   producers append batches, at a rate or as fast as answers come
    read    readers read the whole stream, over and over until the time is up

A latency of a write is that of an event, from when its batch was due until it was acknowledged: a
producer that falls behind its rate waits, and the wait counts. One of a read is that of an answer.

Owns the load and the figures. Everything that is measured is the client's and the services'.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierlog.cli.output import Columns, Output, OutputOption, print_rows
from tierlog.cli.session import command, load
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.partitions import count_told, partition_names

if TYPE_CHECKING:
    from tierlog.cli.histogram import Histogram
    from tierlog.client import Acked, Client, StreamWriter

app = typer.Typer(no_args_is_help=True, help="Put load on a stream, and measure.")

MB: Final = 10**6
LENGTH_LEN: Final = 4
"""What a batch counts of an event besides its bytes."""


def _figure(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


LATENCIES: Final = ("average_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")
COLUMNS: Final[Columns] = {
    "stream": None,
    "seconds": _figure,
    "mb_per_s": _figure,
    "events_per_s": _figure,
    "batches_per_s": _figure,
    **dict.fromkeys(LATENCIES, _figure),
}

Stream = Annotated[str, typer.Argument(help="The stream; made if there is none.")]
Duration = Annotated[float, typer.Option(min=0.1, help="Seconds that count.")]
Warmup = Annotated[float, typer.Option(min=0, help="Seconds before that, which do not.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLoad:
    """What producers do. ``rate``: events a second of all of them; 0: as fast as answers come."""

    stream: str
    producers: int = 1
    batch_events: int = 100
    event_bytes: int = 100
    rate: float = 0.0
    window: int = 4
    """So many batches of a producer are without an answer at most."""
    duration_s: float = 10.0
    warmup_s: float = 1.0
    conditional: bool = True

    @property
    def batch_bytes(self) -> int:
        """What the events of a batch come to."""
        return self.batch_events * (self.event_bytes + LENGTH_LEN)

    def check(self, bytes_max: int) -> None:
        """Refuse batches that no frame holds, before the first one is in memory."""
        if self.batch_bytes > bytes_max:
            raise RefusedError(
                f"a batch of {self.batch_bytes} bytes is above the {bytes_max} of a frame",
                reason=Reason.TOO_LARGE,
                remedy="Give fewer --batch-events, or --event-bytes",
            )


@app.command("write")
@command
def write(
    stream: Stream,
    *,
    producers: Annotated[int, typer.Option(min=1, help="Writers, each with a connection.")] = 1,
    batch_events: Annotated[int, typer.Option(min=1, help="Events of one append.")] = 100,
    event_bytes: Annotated[int, typer.Option(min=1, help="Bytes of an event.")] = 100,
    rate: Annotated[
        float, typer.Option(min=0, help="Events a second of all producers; 0: all they can.")
    ] = 0.0,
    window: Annotated[
        int, typer.Option(min=1, help="Batches of a producer that wait for an answer at most.")
    ] = 4,
    duration: Duration = 10.0,
    warmup: Warmup = 1.0,
    conditional: Annotated[
        bool,
        typer.Option("--conditional/--plain", help="Exactly once, or without a writer's number."),
    ] = True,
    output: OutputOption = Output.TABLE,
) -> None:
    """Append as producers do, and print throughput and latencies.

    Each producer of a partitioned stream writes to one partition.
    """
    wanted = WriteLoad(
        stream=stream,
        producers=producers,
        batch_events=batch_events,
        event_bytes=event_bytes,
        rate=rate,
        window=window,
        duration_s=duration,
        warmup_s=warmup,
        conditional=conditional,
    )

    async def run() -> dict[str, object]:
        from tierlog.client import open_client

        settings = load()
        wanted.check(settings.wire.frame_bytes_max)
        async with open_client(settings) as client:
            return await write_load(client, wanted)

    print_rows([asyncio.run(run())], COLUMNS, output)


@app.command("read")
@command
def read(
    stream: Annotated[str, typer.Argument(help="The stream.")],
    *,
    readers: Annotated[int, typer.Option(min=1, help="How many read at once.")] = 1,
    duration: Duration = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read a stream from its beginning, again and again, and print throughput and latencies."""

    async def run() -> dict[str, object]:
        from tierlog.client import open_client

        async with open_client(load()) as client:
            return await read_load(client, stream, readers=readers, duration_s=duration)

    print_rows([asyncio.run(run())], COLUMNS, output)


@dataclass(slots=True)
class _Measure:
    """What is counted from ``begin_s`` to ``end_s`` of the loop's clock."""

    begin_s: float
    end_s: float
    latencies: "Histogram"
    events: int = 0
    batches: int = 0
    byte_count: int = 0

    def add(self, now_s: float, latency_s: float, *, events: int, byte_count: int) -> None:
        if self.begin_s <= now_s < self.end_s:
            self.latencies.add(latency_s, events)
            self.events += events
            self.batches += 1
            self.byte_count += byte_count

    def document(self, stream: str) -> dict[str, object]:
        seconds = self.end_s - self.begin_s
        return {
            "stream": stream,
            "seconds": seconds,
            "mb_per_s": self.byte_count / MB / seconds,
            "events_per_s": self.events / seconds,
            "batches_per_s": self.batches / seconds,
            "events": self.events,
            "bytes": self.byte_count,
            **self.latencies.document(),
        }


async def write_load(client: "Client", wanted: WriteLoad) -> dict[str, object]:
    """Run the producers; return what is printed."""
    from tierlog.cli.histogram import Histogram

    names = await _streams_of(client, wanted.stream)
    async with contextlib.AsyncExitStack() as stack:
        producers = [
            _Producer(wanted, names[number % len(names)], number)
            for number in range(wanted.producers)
        ]
        for one in producers:
            await stack.enter_async_context(one.opened(client))
        begin_s = asyncio.get_running_loop().time() + wanted.warmup_s
        measure = _Measure(begin_s, begin_s + wanted.duration_s, Histogram())
        async with asyncio.TaskGroup() as tasks:
            for one in producers:
                tasks.create_task(one.run(measure))
    return measure.document(wanted.stream) | {
        "producers": wanted.producers,
        "batch_events": wanted.batch_events,
        "event_bytes": wanted.event_bytes,
        "window": wanted.window,
        "conditional": wanted.conditional,
    }


@dataclass(slots=True)
class _Producer:
    """One writer, and the batches of it that wait for an answer."""

    wanted: WriteLoad
    stream: str
    number: int
    _sent: int = 0
    _waiting: deque[tuple[int, float]] = field(default_factory=deque)
    """Last number of the batches without an answer, and when they were due, the oldest first."""
    _measure: _Measure | None = None
    _writer: "StreamWriter | None" = None

    @contextlib.asynccontextmanager
    async def opened(self, client: "Client") -> AsyncIterator[None]:
        from tierlog.client import StreamWriter

        wanted = self.wanted
        async with client.writer(
            self.stream,
            batch_bytes=wanted.batch_bytes,
            linger_s=0,
            exactly_once=wanted.conditional,
            on_acked=self._acked,
        ) as writer:
            assert isinstance(writer, StreamWriter), "a producer has one stream, or one partition"
            self._writer = writer
            yield

    async def run(self, measure: _Measure) -> None:
        """Send until the time is up."""
        wanted, loop = self.wanted, asyncio.get_running_loop()
        assert self._writer is not None
        self._measure = measure
        pattern = bytes(range(256)) * (-(-(wanted.event_bytes + 256) // 256))
        event = pattern[self.number % 256 :][: wanted.event_bytes]
        send, count = self._writer.send, wanted.batch_events
        pause_s = wanted.batch_events * wanted.producers / wanted.rate if wanted.rate else 0.0
        # Producers begin apart, so that a rate is not one of bursts.
        due_s = loop.time() + pause_s * self.number / wanted.producers
        while True:
            if pause_s:
                await asyncio.sleep(max(0.0, min(due_s, measure.end_s) - loop.time()))
            await self._writer.room(wanted.window * count)
            now_s = loop.time()
            if now_s >= measure.end_s:
                return
            self._sent += count
            self._waiting.append((self._sent, due_s if pause_s else now_s))
            for _ in range(count):
                await send(event)
            due_s += pause_s
            if not pause_s:
                await asyncio.sleep(0)

    def _acked(self, acked: "Acked") -> None:
        now_s = asyncio.get_running_loop().time()
        events = acked.count
        while self._waiting and self._waiting[0][0] <= acked.event_number:
            _, due_s = self._waiting.popleft()
            if self._measure is not None:
                byte_count = events * self.wanted.event_bytes
                self._measure.add(now_s, now_s - due_s, events=events, byte_count=byte_count)
            events = 0


async def _streams_of(client: "Client", stream: str) -> list[str]:
    """Return the stream, which is made if need be, or its partitions."""
    from tierlog.model.ids import stream_name

    try:
        await client.create_stream(stream)
    except RefusedError as error:
        count = count_told(error)
        if count is None:
            raise
        return [str(one) for one in partition_names(stream_name(stream), count)]
    return [stream]


async def read_load(
    client: "Client", stream: str, *, readers: int, duration_s: float
) -> dict[str, object]:
    """Run the readers; return what is printed."""
    from tierlog.cli.histogram import Histogram

    loop = asyncio.get_running_loop()
    measure = _Measure(loop.time(), math.inf, Histogram())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(readers):
            until_s = measure.begin_s + duration_s
            tasks.create_task(_read_again_and_again(client, stream, measure, until_s))
    # Answers are large: the one that is under way when the time is up counts, with its time.
    measure.end_s = loop.time()
    return measure.document(stream) | {"readers": readers}


async def _read_again_and_again(
    client: "Client", stream: str, measure: _Measure, until_s: float
) -> None:
    from tierlog.client.reading import entries_of

    loop = asyncio.get_running_loop()
    while loop.time() < until_s:
        asked_s = loop.time()
        reader = client.reader(stream)
        async with contextlib.aclosing(reader.answers()) as answers:
            async for answer in answers:
                latency_s = loop.time() - asked_s
                entries = entries_of(answer)
                found = [event for entry in entries for event in reader.events_of(entry)]
                now_s = loop.time()
                measure.add(
                    now_s,
                    latency_s,
                    events=len(found),
                    byte_count=sum(len(event.payload) for event in found),
                )
                if now_s >= until_s:
                    return
                asked_s = now_s
        await asyncio.sleep(0)
