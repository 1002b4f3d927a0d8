"""Compressed events are read wherever plain ones are, and take no more memory than they say."""

import random
import sys
import tracemalloc
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import UUID

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.simulation.virtual_loop import run_virtual
from tests.unit.client.world import LOGS, Service, writer_of
from tests.unit.offload.test_export import UUID_1, exported, handle_of
from tests.unit.offload.world import CLUSTER, World
from tierlog.adapters import compression as libraries
from tierlog.adapters.compression import lz4_frames, zstd
from tierlog.adapters.compression.bounded import PIECE_BYTES
from tierlog.cli.main import app
from tierlog.client import client as client_module
from tierlog.client.batches import BatchBuilder
from tierlog.client.client import Client
from tierlog.format.entry import (
    AttributeUpdate,
    Codec,
    StructuredEvent,
    Verb,
    decode_entry,
    encode_entry,
    unpacked_size,
)
from tierlog.format.frame import pack_entries
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.node import Cluster
from tierlog.offload import export
from tierlog.proto.v1 import entry_pb2 as pb
from tierlog.runtime.settings import Settings
from tierlog.wiring import compression
from tierlog.wiring.client import open_client_connections
from tierlog.wiring.compression import decompressors, packing_of, packings
from tierlog.wiring.offload import ledger_offloader
from tierlog_spark import decoding
from tierlog_spark.batches import record_batches
from tierlog_spark.decoding import events_in
from tierlog_spark.reading import wanted_events

COMPRESSORS = {Codec.ZSTD: zstd.compress, Codec.LZ4: lz4_frames.compress}
codecs = pytest.mark.parametrize("codec", list(COMPRESSORS))
UPDATES = (AttributeUpdate(key=UUID(int=3), verb=Verb.REPLACE, value=1),)
NOWHERE = "127.0.0.1:1"
BOMB_LEN = 100_000_000


def packed(codec, events, **named):
    """Return one append."""
    return encode_entry(
        events, publish_time_ms=1000, codec=codec, compress=COMPRESSORS.get(codec), **named
    )


def entries(codec):
    """Return the same appends, whatever the codec."""
    structured = [
        StructuredEvent(payload=bytes([n]) * 99, key=b"k", event_time_ms=n) for n in (1, 2)
    ]
    writer = {"writer_id": UUID(int=9), "event_number": 10}
    return [
        packed(codec, [b"a" * 50, b"b" * 1000, b""], **writer),
        packed(codec, structured, **writer),
        packed(codec, [], attribute_updates=UPDATES),
        packed(codec, [b"plain text, again and again " * 9]),
    ]


# --------------------------------------------------------------------------- the libraries


@codecs
@given(st.lists(st.integers(0, 2 * PIECE_BYTES), max_size=3), st.binary(max_size=300))
def test_what_was_compressed_comes_back_in_pieces(codec, sizes, data):
    data += b"".join(bytes([n]) * size for n, size in enumerate(sizes))
    made = COMPRESSORS[codec](data)
    assert decompressors()[codec](memoryview(made), len(data)) == data
    if data:
        with pytest.raises(ValueError, match=f"more than {len(data) - 1} bytes"):
            decompressors()[codec](made, len(data) - 1)


@codecs
@pytest.mark.parametrize("length_max", [0, 10, 3 * PIECE_BYTES])
def test_a_bomb_is_refused_before_it_is_there(codec, length_max):
    bomb, decompress = COMPRESSORS[codec](bytes(BOMB_LEN)), decompressors()[codec]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"more than {length_max} bytes"):
            decompress(bomb, length_max)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < length_max + 2 * PIECE_BYTES + len(bomb)


def test_a_window_that_is_larger_than_what_may_come_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=0)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    made = compressor.compress(b"few") + compressor.flush()
    assert zstandard.get_frame_parameters(made).window_size == 1 << 27
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstd.decompress(made, 100)
    assert zstd.decompress(made, 1 << 27) == b"few"


@codecs
def test_a_frame_that_is_cut_is_no_frame(codec):
    # Of zstd the length shows it, which whoever decompresses knows.
    made = COMPRESSORS[codec](b"abc" * 100)
    try:
        found = decompressors()[codec](made[:-9], 300)
    except (ValueError, zstandard.ZstdError):
        return
    assert len(found) < 300


def test_room_is_for_what_events_say_they_are():
    events = [bytes(10_000)]
    for codec in Codec:
        data = packed(codec, events)
        assert unpacked_size(data)[0] == max(len(data), 10_004 * (codec is not Codec.NONE))
    for damaged in (
        b"",
        b"TE",
        b"TE\x01\x00\xff\xff\xff\xff    ",
        b"TE\x01\x00\0\0\0\x02    \xff\xff",
    ):
        assert unpacked_size(damaged) == (len(damaged), 0)


@pytest.mark.parametrize("codec", Codec)
def test_events_are_counted_unread_and_no_more_than_have_room(codec):
    assert unpacked_size(packed(codec, [b""] * 700))[1] == 700
    assert unpacked_size(packed(codec, []))[1] == 0
    said = pb.AppendHeader(event_count=2**31 - 1).SerializeToString()
    data = b"TE\x01\x00" + len(said).to_bytes(4, "big") + bytes(4) + said + bytes(400)
    assert unpacked_size(data) == (len(data), len(data) // 4)


@pytest.mark.parametrize("name", ["zstandard", "lz4"])
def test_without_its_library_a_codec_is_refused_and_the_other_is_read(monkeypatch, name):
    for module in ("zstd", "lz4_frames"):
        monkeypatch.delitem(sys.modules, f"{libraries.__name__}.{module}")
        monkeypatch.delattr(libraries, module)
    for module in [one for one in sys.modules if one.partition(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    found = packings.__wrapped__()
    gone = Codec.ZSTD if name == "zstandard" else Codec.LZ4
    assert found.keys() == COMPRESSORS.keys() - {gone}


# --------------------------------------------------------------------------- who reads


@asynccontextmanager
async def over_memory(service, settings, **named):
    """Give the real connections, but those of reads: they are a memory twin's."""
    async with open_client_connections(settings, **named) as connections:
        yield replace(connections, reads=service)


def stream_of(codec):
    service = Service()
    service.lay([entries(codec)[:2], entries(codec)[2:]])
    return service


@codecs
def test_the_client_reads_them(codec):
    async def read(codec):
        addresses = {"ingest_grpc": NOWHERE, "reader_http": NOWHERE, "scheduler_http": NOWHERE}
        async with over_memory(stream_of(codec), Settings(), **addresses) as connections:
            return [one async for one in Client(connections).reader(LOGS).events()]

    found = run_virtual(read(codec))
    assert len(found) == 6
    assert found == run_virtual(read(Codec.NONE))


@codecs
def test_the_command_line_prints_them(codec, monkeypatch):
    for name in ("INGEST", "READER_HTTP", "SCHEDULER_HTTP"):
        monkeypatch.setenv(f"TIERLOG_CLIENT__{name}_ADDRESS", NOWHERE)

    def printed(codec):
        service = stream_of(codec)
        monkeypatch.setattr(
            client_module,
            "open_client_connections",
            lambda settings, **named: over_memory(service, settings, **named),
        )
        done = CliRunner().invoke(app, ["read", LOGS, "-o", "jsonl"])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    found = printed(codec)
    assert found.count("\n") == 6
    assert found == printed(Codec.NONE)


def offloaded(entries_of_it):
    """Return the lines of the export copy that an offloader writes."""

    async def main():
        world = World()
        settings = Settings()
        s3 = settings.s3.model_copy(update={"export_events": True, "bucket": "b"})
        settings = settings.model_copy(update={"s3": s3})
        cluster = Cluster(cluster_id=CLUSTER, created_ms=1)
        offloader = ledger_offloader(settings, cluster, world.bucket.connect())
        await offloader.offload(handle_of(entries_of_it), UUID_1, {})
        return (
            exported(world) if any(key.endswith("ndjson") for key in world.bucket.objects) else []
        )

    return run_virtual(main())


@codecs
def test_an_offloader_exports_them(codec):
    found = offloaded(entries(codec))
    assert len(found) == 6
    assert found == offloaded(entries(Codec.NONE))


@codecs
def test_events_of_an_entry_that_would_take_all_memory_are_not_exported(codec, monkeypatch):
    monkeypatch.setattr(export, "EVENTS_LEN_MAX", 500)
    assert offloaded([packed(codec, [bytes(496)])])
    assert not offloaded([packed(codec, [bytes(497)])])


@codecs
def test_spark_reads_them(codec):
    schema = pa.schema(
        [
            pa.field("entry_id", pa.int64()),
            pa.field("event_index", pa.int32()),
            pa.field("writer_id", pa.string()),
            pa.field("event_number", pa.int64()),
            pa.field("key", pa.binary()),
            pa.field("payload", pa.binary()),
        ]
    )

    def rows(codec):
        frames, offsets = pack_entries(entries(codec), 5)
        view = memoryview(frames)
        return [
            row
            for events in wanted_events(view, offsets, 5, raw=False, verify=True, times=(0, 2000))
            for batch in record_batches(events, schema, stream="s", ledger_id=7)
            for row in batch.to_pylist()
        ]

    found = rows(codec)
    assert len(found) == 6
    assert found == rows(Codec.NONE)


@codecs
def test_spark_decompresses_so_much_at_once_and_an_entry_above_it_alone(codec, monkeypatch):
    monkeypatch.setattr(decoding, "UNPACKED_BYTES_MAX", 1000)
    monkeypatch.setattr(decoding, "EVENT_BYTES", 0)

    def parts(sizes):
        frames, offsets = pack_entries([packed(codec, [bytes(size)]) for size in sizes], 5)
        found = events_in(
            memoryview(frames), offsets, 5, verify=True, decompressors=decompressors()
        )
        return [list(zip(one.entries.entry_ids, one.lens, strict=True)) for one in found]

    assert parts([400, 400, 400, 996, 100]) == [
        [(5, 400), (6, 400)],
        [(7, 400)],
        [(8, 996)],
        [(9, 100)],
    ]
    assert parts([400, 40_000, 400]) == [[(5, 400)], [(6, 40_000)], [(7, 400)]]
    # What no client would read either is refused, with its place.
    monkeypatch.setattr(decoding, "EVENTS_LEN_MAX", 40_003)
    with pytest.raises(RefusedError) as caught:
        parts([400, 40_000])
    assert caught.value.details["entry_id"] == "6"


@codecs
def test_who_cant_decompress_says_what_to_install_and_where_it_was_met(codec):
    async def main():
        service = stream_of(codec)
        addresses = {"ingest_grpc": NOWHERE, "reader_http": NOWHERE, "scheduler_http": NOWHERE}
        async with over_memory(service, Settings(), **addresses) as connections:
            reader = Client(replace(connections, decompressors={})).reader(LOGS)
            with pytest.raises(RefusedError, match=codec.name.lower()) as refused:
                await anext(reader.events())
        assert "tierlog[compression]" in refused.value.remedy
        assert refused.value.details["position"] == "0:0"
        assert refused.value.reason is not Reason.TOO_LARGE

    run_virtual(main())


# --------------------------------------------------------------------------- who appends


@codecs
def test_a_writer_compresses_what_gets_shorter_by_it(codec):
    async def main():
        service, packing = Service(), packing_of(codec.name.lower())
        long, short = [b"%d" % n * 500 for n in range(4)], [random.Random(1).randbytes(40)]
        async with writer_of(service, batch_bytes=900, packing=packing) as writer:
            for event in long + short:
                await writer.send(event)
        found = [decode_entry(entry).header.codec for ledger in service.ledgers for entry in ledger]
        assert found == [codec, codec, Codec.NONE]
        assert service.events() == long + short
        assert writer.acked_bytes == sum(map(len, long + short))

    run_virtual(main())


@codecs
def test_what_of_a_batch_is_not_there_yet_is_compressed_again(codec):
    packing = packing_of(codec.name.lower())
    builder = BatchBuilder(UUID(int=9), raw=False, batch_bytes=10_000, packing=packing)
    events = [b"%d" % n * 500 for n in range(4)]
    for event in events:
        builder.add(event)
    rest = builder.rest(builder.build(now_ms=5), 2)
    (data,) = rest.draft.entries()
    entry = decode_entry(data)
    assert (entry.header.codec, entry.header.event_number) == (codec, 4)
    assert entry.events(decompressors()) == events[2:]


def test_a_compression_that_is_none_or_not_here_is_refused(monkeypatch):
    assert packing_of("none") is None
    with pytest.raises(RefusedError) as refused:
        packing_of("gzip")
    assert "zstd" in refused.value.remedy
    monkeypatch.setattr(compression, "packings", dict)
    with pytest.raises(RefusedError) as refused:
        packing_of("zstd")
    assert refused.value.remedy == "Install tierlog[compression]"
