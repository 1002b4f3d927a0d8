package tierlog.interop;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.UUID;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.common.util.OrderedScheduler;
import org.apache.bookkeeper.mledger.LedgerOffloader;
import org.apache.bookkeeper.mledger.offload.jcloud.JCloudLedgerOffloaderFactory;
import org.apache.bookkeeper.mledger.offload.jcloud.provider.TieredStorageConfiguration;
import org.apache.pulsar.common.policies.data.OffloadPoliciesImpl;
import org.jclouds.blobstore.BlobStore;

/**
 * Offloads, reads, checks and deletes ledgers with Apache Pulsar's own code:
 * ENDPOINT BUCKET ACCESS_KEY SECRET_KEY.
 *
 * <p>Each line of stdin is a JSON object with an {@code op}; each is answered by one line of JSON on
 * stdout, in order. Logs go to stderr. It ends when stdin does.
 *
 * <pre>
 * write   ledger_id, uuid, block_size, file, sizes [[count, size]…]   offloads entries that are slices
 *         of the file, from memory; what it took
 * read    ledger_id, uuid, batch, singly [entry…]   all entries, then single ones; digests
 * scan    ledger_id, uuid, batch   all entries, in order, which are only looked at; what it took
 * pick    ledger_id, uuid, singly [entry…]   single entries, one after the other; what each took
 * check   ledger_id, uuid, block_size   the raw bytes, as {@link Blocks} says
 * delete  ledger_id, uuid
 * </pre>
 *
 * <p>A ledger id is used once: Pulsar's reader remembers offsets by it, whatever the UUID.
 */
public final class Interop {
    private static final int DEFAULT_BLOCK_SIZE = 64 << 20;
    private static final String STREAM = "public/default/persistent/interop";

    private final OrderedScheduler scheduler =
        OrderedScheduler.newSchedulerBuilder().numThreads(1).name("offloader").build();
    private final Map<Integer, LedgerOffloader> offloaders = new HashMap<>();
    private BlobStore store;
    private final String endpoint;
    private final String bucket;
    private final String accessKey;
    private final String secretKey;

    private Interop(String[] args) {
        endpoint = args[0];
        bucket = args[1];
        accessKey = args[2];
        secretKey = args[3];
        // jclouds asks AWS itself for the region of a bucket unless it is told otherwise, and Pulsar
        // hands on system properties that begin with its name
        System.setProperty("jclouds.region.us-standard.endpoint", endpoint);
    }

    public static void main(String[] args) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err); // nobody else's words come between
        Interop interop = new Interop(args);
        ObjectMapper json = new ObjectMapper();
        BufferedReader asked = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = asked.readLine(); line != null; line = asked.readLine()) {
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                interop.serve(json.readTree(line), answer);
                answer.put("ok", true);
            } catch (Exception error) {
                error.printStackTrace();
                answer.put("ok", false);
                answer.put("error", error.toString());
            }
            answers.println(json.writeValueAsString(answer));
            answers.flush();
        }
        Runtime.getRuntime().halt(0); // threads of the libraries would go on
    }

    private void serve(JsonNode asked, Map<String, Object> answer) throws Exception {
        long ledgerId = asked.get("ledger_id").asLong();
        UUID uuid = UUID.fromString(asked.get("uuid").asText());
        switch (asked.get("op").asText()) {
            case "write" -> write(asked, ledgerId, uuid, answer);
            case "read" -> read(asked, ledgerId, uuid, answer);
            case "scan" -> scan(asked, ledgerId, uuid, answer);
            case "pick" -> pick(asked, ledgerId, uuid, answer);
            case "check" -> Blocks.check(store(), bucket, ledgerId, uuid, blockSize(asked), answer);
            case "delete" -> {
                LedgerOffloader offloader = offloader(blockSize(asked));
                offloader.deleteOffloaded(ledgerId, uuid, offloader.getOffloadDriverMetadata()).get();
            }
            default -> throw new IllegalArgumentException("no such op: " + asked.get("op"));
        }
    }

    private static int blockSize(JsonNode asked) {
        return asked.has("block_size") ? asked.get("block_size").asInt() : DEFAULT_BLOCK_SIZE;
    }

    private OffloadPoliciesImpl policies(int blockSize) {
        OffloadPoliciesImpl policies = new OffloadPoliciesImpl();
        policies.setManagedLedgerOffloadDriver("aws-s3");
        policies.setS3ManagedLedgerOffloadServiceEndpoint(endpoint);
        policies.setS3ManagedLedgerOffloadBucket(bucket);
        policies.setS3ManagedLedgerOffloadCredentialId(accessKey);
        policies.setS3ManagedLedgerOffloadCredentialSecret(secretKey);
        policies.setS3ManagedLedgerOffloadMaxBlockSizeInBytes(blockSize);
        policies.setS3ManagedLedgerOffloadReadBufferSizeInBytes(1 << 20);
        return policies;
    }

    private LedgerOffloader offloader(int blockSize) throws Exception {
        LedgerOffloader known = offloaders.get(blockSize);
        if (known == null) {
            // the user metadata that a broker gives (PulsarService.createManagedLedgerOffloader)
            known = new JCloudLedgerOffloaderFactory().create(policies(blockSize), Map.of(
                LedgerOffloader.METADATA_SOFTWARE_VERSION_KEY.toLowerCase(), "4.0.8",
                LedgerOffloader.METADATA_SOFTWARE_GITSHA_KEY.toLowerCase(), "interop",
                LedgerOffloader.METADATA_PULSAR_CLUSTER_NAME.toLowerCase(), "interop"), scheduler);
            offloaders.put(blockSize, known);
        }
        return known;
    }

    private BlobStore store() throws Exception {
        if (store == null) {
            store = TieredStorageConfiguration.create(policies(DEFAULT_BLOCK_SIZE).toProperties()).getBlobStore();
        }
        return store;
    }

    private void write(JsonNode asked, long ledgerId, UUID uuid, Map<String, Object> answer)
        throws Exception {
        ReadHandle ledger = MemoryLedger.of(
            ledgerId, Path.of(asked.get("file").asText()), asked.get("sizes"), STREAM);
        LedgerOffloader offloader = offloader(blockSize(asked));
        long cpu = cpuNanos();
        long start = System.nanoTime();
        offloader.offload(ledger, uuid, Map.of("ManagedLedgerName", STREAM)).get();
        answer.put("seconds", (System.nanoTime() - start) / 1e9);
        answer.put("cpu_s", (cpuNanos() - cpu) / 1e9);
        answer.put("bytes", ledger.getLength());
        answer.put("metadata", told(ledger.getLedgerMetadata()));
    }

    private ReadHandle opened(JsonNode asked, long ledgerId, UUID uuid) throws Exception {
        LedgerOffloader offloader = offloader(blockSize(asked));
        Map<String, String> place = new HashMap<>(offloader.getOffloadDriverMetadata());
        place.put("ManagedLedgerName", STREAM);
        return offloader.readOffloaded(ledgerId, uuid, place).get();
    }

    private void scan(JsonNode asked, long ledgerId, UUID uuid, Map<String, Object> answer)
        throws Exception {
        long batch = asked.get("batch").asLong();
        long opening = System.nanoTime();
        try (ReadHandle ledger = opened(asked, ledgerId, uuid)) {
            long cpu = cpuNanos();
            long start = System.nanoTime();
            long last = ledger.getLastAddConfirmed();
            long count = 0;
            long bytes = 0;
            for (long first = 0; first <= last; first += batch) {
                try (LedgerEntries entries = ledger.read(first, Math.min(last, first + batch - 1))) {
                    for (LedgerEntry entry : entries) {
                        count++;
                        bytes += entry.getLength();
                    }
                }
            }
            answer.put("seconds", (System.nanoTime() - start) / 1e9);
            answer.put("cpu_s", (cpuNanos() - cpu) / 1e9);
            answer.put("open_s", (start - opening) / 1e9);
            answer.put("entries", count);
            answer.put("bytes", bytes);
        }
    }

    private void pick(JsonNode asked, long ledgerId, UUID uuid, Map<String, Object> answer)
        throws Exception {
        List<Double> seconds = new ArrayList<>();
        long bytes = 0;
        try (ReadHandle ledger = opened(asked, ledgerId, uuid)) {
            for (JsonNode entry : asked.get("singly")) {
                long start = System.nanoTime();
                try (LedgerEntries entries = ledger.read(entry.asLong(), entry.asLong())) {
                    bytes += entries.getEntry(entry.asLong()).getLength();
                }
                seconds.add((System.nanoTime() - start) / 1e9);
            }
        }
        answer.put("seconds", seconds);
        answer.put("bytes", bytes);
    }

    private void read(JsonNode asked, long ledgerId, UUID uuid, Map<String, Object> answer)
        throws Exception {
        long batch = asked.get("batch").asLong();
        try (ReadHandle ledger = opened(asked, ledgerId, uuid)) {
            answer.put("metadata", told(ledger.getLedgerMetadata()));
            long last = ledger.getLastAddConfirmed();
            MessageDigest all = MessageDigest.getInstance("SHA-256");
            long count = 0;
            for (long first = 0; first <= last; first += batch) {
                count += digest(ledger, first, Math.min(last, first + batch - 1), all);
            }
            answer.put("entries", count);
            answer.put("sha256", HexFormat.of().formatHex(all.digest()));
            MessageDigest singly = MessageDigest.getInstance("SHA-256");
            for (JsonNode entry : asked.get("singly")) {
                digest(ledger, entry.asLong(), entry.asLong(), singly);
            }
            answer.put("singly_sha256", HexFormat.of().formatHex(singly.digest()));
        }
    }

    /** Of each entry its id as 8 bytes, then its bytes. */
    private static long digest(ReadHandle ledger, long first, long last, MessageDigest into)
        throws Exception {
        long count = 0;
        try (LedgerEntries entries = ledger.read(first, last)) {
            for (LedgerEntry entry : entries) {
                into.update(ByteBuffer.allocate(8).putLong(0, entry.getEntryId()));
                into.update(entry.getEntryNioBuffer());
                count++;
            }
        }
        return count;
    }

    private static Map<String, Object> told(LedgerMetadata metadata) {
        Map<String, String> custom = new TreeMap<>();
        metadata.getCustomMetadata().forEach(
            (key, value) -> custom.put(key, new String(value, StandardCharsets.UTF_8)));
        return Map.of(
            "ensemble_size", metadata.getEnsembleSize(),
            "write_quorum", metadata.getWriteQuorumSize(),
            "ack_quorum", metadata.getAckQuorumSize(),
            "last_entry_id", metadata.getLastEntryId(),
            "length", metadata.getLength(),
            "state", metadata.getState().toString(),
            "digest_type", metadata.getDigestType().toString(),
            "custom", custom);
    }

    private static long cpuNanos() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
            .getProcessCpuTime();
    }
}
