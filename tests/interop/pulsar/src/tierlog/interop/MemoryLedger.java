package tierlog.interop;

import com.fasterxml.jackson.databind.JsonNode;
import io.netty.buffer.Unpooled;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.client.LedgerMetadataBuilder;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.impl.LedgerEntriesImpl;
import org.apache.bookkeeper.client.impl.LedgerEntryImpl;
import org.apache.bookkeeper.net.BookieId;

/**
 * A closed ledger of entries that lie in memory, as a managed ledger would hand it to an offloader.
 *
 * <p>Entries are slices of one file, one behind the other; one that would go over its end begins at
 * its start again.
 */
final class MemoryLedger implements ReadHandle {
    private final long ledgerId;
    private final byte[] pool;
    private final int[] sizes;
    private final int[] places;
    private final LedgerMetadata metadata;

    private MemoryLedger(long ledgerId, byte[] pool, int[] sizes, String stream) {
        this.ledgerId = ledgerId;
        this.pool = pool;
        this.sizes = sizes;
        places = new int[sizes.length];
        long length = 0;
        int at = 0;
        for (int i = 0; i < sizes.length; i++) {
            at = at + sizes[i] > pool.length ? 0 : at;
            places[i] = at;
            at += sizes[i];
            length += sizes[i];
        }
        metadata = LedgerMetadataBuilder.create()
            .withId(ledgerId).withMetadataFormatVersion(3)
            .withEnsembleSize(3).withWriteQuorumSize(2).withAckQuorumSize(2)
            .withDigestType(DigestType.CRC32C).withPassword("pw".getBytes())
            .newEnsembleEntry(0, List.of(BookieId.parse("127.0.0.1:3181"),
                BookieId.parse("127.0.0.1:3182"), BookieId.parse("127.0.0.1:3183")))
            .withCustomMetadata(Map.of("application", "pulsar".getBytes(),
                "component", "managed-ledger".getBytes(), "pulsar/managed-ledger", stream.getBytes()))
            .withCreationTime(1_700_000_000_000L).storingCreationTime(true)
            .withClosedState().withLastEntryId(sizes.length - 1).withLength(length).build();
    }

    /** Takes sizes as pairs of how many and how long. */
    static MemoryLedger of(long ledgerId, Path file, JsonNode pairs, String stream) throws IOException {
        int count = 0;
        for (JsonNode pair : pairs) {
            count += pair.get(0).asInt();
        }
        int[] sizes = new int[count];
        int at = 0;
        for (JsonNode pair : pairs) {
            Arrays.fill(sizes, at, at + pair.get(0).asInt(), pair.get(1).asInt());
            at += pair.get(0).asInt();
        }
        return new MemoryLedger(ledgerId, Files.readAllBytes(file), sizes, stream);
    }

    @Override
    public CompletableFuture<LedgerEntries> readAsync(long first, long last) {
        List<LedgerEntry> entries = new ArrayList<>((int) (last - first + 1));
        for (int i = (int) first; i <= last; i++) {
            entries.add(LedgerEntryImpl.create(
                ledgerId, i, sizes[i], Unpooled.wrappedBuffer(pool, places[i], sizes[i])));
        }
        return CompletableFuture.completedFuture(LedgerEntriesImpl.create(entries));
    }

    @Override
    public CompletableFuture<LedgerEntries> readUnconfirmedAsync(long first, long last) {
        return readAsync(first, last);
    }

    @Override
    public long getId() {
        return ledgerId;
    }

    @Override
    public LedgerMetadata getLedgerMetadata() {
        return metadata;
    }

    @Override
    public long getLastAddConfirmed() {
        return sizes.length - 1;
    }

    @Override
    public long getLength() {
        return metadata.getLength();
    }

    @Override
    public boolean isClosed() {
        return true;
    }

    @Override
    public CompletableFuture<Long> readLastAddConfirmedAsync() {
        return CompletableFuture.completedFuture(getLastAddConfirmed());
    }

    @Override
    public CompletableFuture<Long> tryReadLastAddConfirmedAsync() {
        return readLastAddConfirmedAsync();
    }

    @Override
    public CompletableFuture<LastConfirmedAndEntry> readLastAddConfirmedAndEntryAsync(
        long entryId, long timeoutMs, boolean parallel) {
        return CompletableFuture.failedFuture(new UnsupportedOperationException("the ledger is closed"));
    }

    @Override
    public CompletableFuture<Void> closeAsync() {
        return CompletableFuture.completedFuture(null);
    }
}
