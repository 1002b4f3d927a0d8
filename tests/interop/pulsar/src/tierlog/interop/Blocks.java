package tierlog.interop;

import java.io.BufferedInputStream;
import java.io.ByteArrayInputStream;
import java.io.DataInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.util.Map;
import java.util.TreeMap;
import java.util.UUID;
import org.apache.bookkeeper.mledger.offload.jcloud.DataBlockHeader;
import org.apache.bookkeeper.mledger.offload.jcloud.OffloadIndexBlock;
import org.apache.bookkeeper.mledger.offload.jcloud.OffloadIndexBlockBuilder;
import org.apache.bookkeeper.mledger.offload.jcloud.OffloadIndexEntry;
import org.apache.bookkeeper.mledger.offload.jcloud.impl.DataBlockHeaderImpl;
import org.apache.bookkeeper.mledger.offload.jcloud.impl.DataBlockUtils;
import org.jclouds.blobstore.BlobStore;
import org.jclouds.blobstore.domain.Blob;

/**
 * Walks the raw bytes of both objects, with Pulsar's own decoders where it has some.
 *
 * <p>Pulsar's reader never looks at block headers, padding, part ids or the index's own length: it
 * would take objects that Pulsar would never write.
 */
final class Blocks {
    private static final int HEADER_LEN = 128;
    private static final int HEADER_USED_LEN = 28;
    private static final int INDEX_HEADER_LEN = 32;
    private static final int INDEX_ENTRY_LEN = 20;
    private static final int FRAME_HEADER_LEN = 12;
    private static final int PADDING = 0xFEDCDEAD;

    private long entryId;
    private long payload;

    /** Throws with what is wrong; else tells what there is. */
    static void check(BlobStore store, String bucket, long ledgerId, UUID uuid, int blockSize,
        Map<String, Object> answer) throws IOException {
        Blob index = store.getBlob(bucket, DataBlockUtils.indexBlockOffloadKey(ledgerId, uuid));
        Blob data = store.getBlob(bucket, DataBlockUtils.dataBlockOffloadKey(ledgerId, uuid));
        must(index != null && data != null, "an object is not there");
        DataBlockUtils.VERSION_CHECK.check("index", index);
        DataBlockUtils.VERSION_CHECK.check("data", data);
        answer.put("index_user_metadata", new TreeMap<>(index.getMetadata().getUserMetadata()));
        answer.put("data_user_metadata", new TreeMap<>(data.getMetadata().getUserMetadata()));
        byte[] raw;
        try (InputStream in = index.getPayload().openStream()) {
            raw = in.readAllBytes();
        }
        long dataLen = data.getMetadata().getContentMetadata().getContentLength();
        int blocks = checkIndex(raw, dataLen);
        try (DataInputStream in = new DataInputStream(
            new BufferedInputStream(data.getPayload().openStream(), 1 << 20))) {
            new Blocks().checkData(in, raw, blocks, blockSize, answer);
        }
        answer.put("blocks", blocks);
        answer.put("data_len", dataLen);
    }

    private static int checkIndex(byte[] raw, long dataLen) throws IOException {
        DataInputStream in = new DataInputStream(new ByteArrayInputStream(raw, 4, raw.length - 4));
        must(in.readInt() == raw.length, "index_len is not the index object's length");
        must(in.readLong() == dataLen, "data_object_length is not the data object's");
        must(in.readLong() == HEADER_LEN, "data_header_length");
        int blocks = in.readInt();
        must(raw.length == INDEX_HEADER_LEN + in.readInt() + INDEX_ENTRY_LEN * blocks,
            "the index's lengths do not add up");
        return blocks;
    }

    private void checkData(DataInputStream in, byte[] raw, int blocks, int blockSize,
        Map<String, Object> answer) throws IOException {
        OffloadIndexBlock index = (OffloadIndexBlock) OffloadIndexBlockBuilder.create()
            .fromStream(new ByteArrayInputStream(raw));
        long offset = 0;
        for (int part = 1; part <= blocks; part++) {
            OffloadIndexEntry entry = index.getIndexEntryForEntry(entryId);
            must(entry.getEntryId() == entryId && entry.getPartId() == part && entry.getOffset() == offset,
                "the index has %s where entry %d, part %d, offset %d belongs", entry, entryId, part, offset);
            offset += checkBlock(in, blockSize, part == blocks);
        }
        must(in.read() < 0, "bytes behind the last block");
        long last = index.getLedgerMetadata().getLastEntryId();
        must(entryId == last + 1, "entries end at %d, the metadata says %d", entryId - 1, last);
        must(payload == index.getLedgerMetadata().getLength(), "%d bytes of entries, the metadata says %d",
            payload, index.getLedgerMetadata().getLength());
        answer.put("entries", entryId);
        answer.put("payload_bytes", payload);
    }

    private long checkBlock(DataInputStream in, int blockSize, boolean isLast) throws IOException {
        byte[] raw = in.readNBytes(HEADER_LEN);
        DataBlockHeader header = DataBlockHeaderImpl.fromStream(new ByteArrayInputStream(raw));
        for (int i = HEADER_USED_LEN; i < HEADER_LEN; i++) {
            must(raw[i] == 0, "byte %d of a block's header is not zero", i);
        }
        must(header.getHeaderLength() == HEADER_LEN, "header_len is %d", header.getHeaderLength());
        must(header.getFirstEntryId() == entryId, "first_entry_id is %d and not %d",
            header.getFirstEntryId(), entryId);
        must(isLast ? header.getBlockLength() <= blockSize : header.getBlockLength() == blockSize,
            "block_len is %d, of at most %d", header.getBlockLength(), blockSize);
        long left = header.getBlockLength() - HEADER_LEN;
        int word = 0;
        while (left >= 4 && (word = in.readInt()) >= 0) {
            must(in.readLong() == entryId && word + FRAME_HEADER_LEN <= left,
                "another id or length at entry %d", entryId);
            in.skipNBytes(word);
            left -= FRAME_HEADER_LEN + word;
            payload += word;
            entryId++;
        }
        must(!isLast || left == 0, "the last block has %d bytes too many", left);
        if (left >= 4) {
            must(word == PADDING, "padding is %x", word);
            left -= 4;
        }
        for (int i = 0; i < left; i++) {
            must(in.readByte() == (byte) (PADDING >>> (24 - 8 * (i & 3))), "another byte in the padding");
        }
        return header.getBlockLength();
    }

    private static void must(boolean holds, String otherwise, Object... values) {
        if (!holds) {
            throw new IllegalStateException(String.format(otherwise, values));
        }
    }
}
