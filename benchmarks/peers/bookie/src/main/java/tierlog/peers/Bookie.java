package tierlog.peers;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.PooledByteBufAllocator;
import java.io.File;
import java.lang.management.ManagementFactory;
import java.net.ServerSocket;
import java.util.Arrays;
import java.util.Locale;
import java.util.Random;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.LockSupport;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.conf.ServerConfiguration;
import org.apache.bookkeeper.server.EmbeddedServer;
import org.apache.bookkeeper.server.conf.BookieConfiguration;
import org.apache.bookkeeper.util.LocalBookKeeper;

/**
 * Bookies in this JVM, and adds to them: DIR WAY WARMUP SIZE:ENTRIES:OUTSTANDING[:RATE]...
 *
 * <p>WAY client: BookKeeper's client over the loopback, 1/1/1, V2 wire protocol, CRC32C; client:E/W/A:
 * to E bookies with these quorums. WAY direct: calls of one bookie itself, without client, network
 * or checksum of the entry. With RATE, so many entries a second are due, and each counts from when it
 * was. For each work it prints one JSON object on stdout; logs go to stderr.
 */
public final class Bookie {
    private static final byte[] PASSWORD = "pw".getBytes();
    private static final int HEADER_LEN = 36; // ledger, entry, LAC, length, CRC32C
    private static final int POOL_LEN = 32 << 20;

    private final byte[] pool = new byte[POOL_LEN];
    private final BookKeeper client;
    private final org.apache.bookkeeper.bookie.Bookie bookie;
    private final int[] quorums;
    private long directLedgerId = 1L << 40;

    private Bookie(BookKeeper client, org.apache.bookkeeper.bookie.Bookie bookie, int[] quorums) {
        this.client = client;
        this.bookie = bookie;
        this.quorums = quorums;
        new Random(1).nextBytes(pool);
    }

    public static void main(String[] args) {
        try {
            run(args);
            System.exit(0);
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1); // threads of the servers would go on
        }
    }

    private static void run(String[] args) throws Exception {
        File dir = new File(args[0]);
        boolean direct = args[1].equals("direct");
        String[] way = args[1].split(":");
        int[] quorums = Arrays.stream((way.length > 1 ? way[1] : "1/1/1").split("/"))
            .mapToInt(Integer::parseInt).toArray();
        int warmup = Integer.parseInt(args[2]);
        int zkPort = freePort();
        startZooKeeper(dir, zkPort);
        ServerConfiguration conf = configuration(new File(dir, "0"), zkPort);
        EmbeddedServer server = start(conf);
        for (int i = 1; i < quorums[0]; i++) {
            start(configuration(new File(dir, "" + i), zkPort));
        }
        ClientConfiguration clientConf = new ClientConfiguration();
        clientConf.setMetadataServiceUri(conf.getMetadataServiceUri());
        clientConf.setThrottleValue(0); // the default is 5000 requests a second
        clientConf.setUseV2WireProtocol(true);
        try (BookKeeper client = new BookKeeper(clientConf)) {
            Bookie bench = new Bookie(client, server.getBookieService().getServer().getBookie(), quorums);
            for (String work : Arrays.copyOfRange(args, 3, args.length)) {
                String[] parts = work.split(":");
                int size = Integer.parseInt(parts[0]);
                int entries = Integer.parseInt(parts[1]);
                // compiled code, and caches that have grown
                bench.adds(direct, size, Math.min(warmup, (256 << 20) / size), 100, 0);
                double rate = parts.length > 3 ? Double.parseDouble(parts[3]) : 0;
                System.out.println(bench.adds(direct, size, entries, Integer.parseInt(parts[2]), rate));
                System.out.flush();
            }
        }
    }

    private static EmbeddedServer start(ServerConfiguration conf) throws Exception {
        EmbeddedServer server = EmbeddedServer.builder(new BookieConfiguration(conf)).build();
        server.getLifecycleComponentStack().start();
        return server;
    }

    private String adds(boolean direct, int size, int entries, int outstanding, double rate)
        throws Exception {
        LedgerHandle ledger = direct ? null : client.createLedger(
            quorums[0], quorums[1], quorums[2], BookKeeper.DigestType.CRC32C, PASSWORD);
        long ledgerId = directLedgerId++;
        Semaphore slots = new Semaphore(outstanding);
        AtomicInteger failed = new AtomicInteger();
        double[] ms = new double[entries];
        long cpu = cpuNanos();
        long start = System.nanoTime();
        for (int i = 0; i < entries; i++) {
            long due = rate > 0 ? start + (long) (i / rate * 1e9) : 0;
            while (rate > 0 && System.nanoTime() < due) {
                LockSupport.parkNanos(due - System.nanoTime());
            }
            slots.acquire();
            int at = (int) ((long) i * size % (POOL_LEN - size));
            long began = rate > 0 ? due : System.nanoTime();
            if (direct) {
                bookie.addEntry(packed(ledgerId, i, at, size), false, (rc, l, e, address, context) -> {
                    ms[(int) e] = (System.nanoTime() - began) / 1e6;
                    if (rc != BKException.Code.OK) {
                        failed.incrementAndGet();
                    }
                    slots.release();
                }, null, PASSWORD);
            } else {
                ledger.asyncAddEntry(pool, at, size, (rc, l, e, context) -> {
                    ms[(int) e] = (System.nanoTime() - began) / 1e6;
                    if (rc != BKException.Code.OK) {
                        failed.incrementAndGet();
                    }
                    slots.release();
                }, null);
            }
        }
        slots.acquire(outstanding);
        double seconds = (System.nanoTime() - start) / 1e9;
        if (failed.get() != 0) {
            throw new IllegalStateException(failed.get() + " adds failed");
        }
        if (ledger != null) {
            ledger.close();
        }
        Arrays.sort(ms);
        double bytes = (double) entries * size;
        return String.format(Locale.ROOT,
            "{\"entry_size\": %d, \"outstanding\": %d, \"bytes\": %.0f, \"seconds\": %.4f, \"mb_per_s\": %.2f,"
            + " \"cpu_s_per_gb\": %.3f, \"p50_ms\": %.3f, \"p99_ms\": %.3f}",
            size, outstanding, bytes, seconds, bytes / 1e6 / seconds, (cpuNanos() - cpu) / bytes,
            ms[entries / 2], ms[(int) (entries * 0.99)]);
    }

    /** An entry as the client packs it; the bookie does not look at the checksum. */
    private ByteBuf packed(long ledgerId, long entryId, int at, int size) {
        ByteBuf entry = PooledByteBufAllocator.DEFAULT.directBuffer(HEADER_LEN + size);
        entry.writeLong(ledgerId).writeLong(entryId).writeLong(entryId - 1);
        entry.writeLong((entryId + 1) * size).writeInt(0);
        return entry.writeBytes(pool, at, size);
    }

    private static ServerConfiguration configuration(File dir, int zkPort) throws Exception {
        ServerConfiguration conf = new ServerConfiguration();
        conf.setMetadataServiceUri("zk+hierarchical://127.0.0.1:" + zkPort + "/ledgers");
        conf.setAllowLoopback(true);
        conf.setAdvertisedAddress("127.0.0.1");
        conf.setBookiePort(freePort());
        conf.setJournalDirName(new File(dir, "journal").getPath());
        conf.setLedgerDirNames(new String[] {new File(dir, "ledgers").getPath()});
        conf.setDiskUsageThreshold(0.99f);
        conf.setDiskUsageWarnThreshold(0.98f);
        // as Pulsar ships it; the journal is synced before answers (the default)
        conf.setLedgerStorageClass("org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage");
        conf.setJournalMaxGroupWaitMSec(1);
        conf.setProperty("dbStorage_writeCacheMaxSizeMb", 256);
        conf.setProperty("dbStorage_readAheadCacheMaxSizeMb", 64);
        conf.setProperty("dbStorage_rocksDB_blockCacheSize", 64 << 20);
        return conf;
    }

    private static void startZooKeeper(File dir, int port) throws Exception {
        System.setProperty("zookeeper.4lw.commands.whitelist", "*"); // or the start waits for "stat"
        System.setProperty("zookeeper.admin.enableServer", "false");
        File zk = new File(dir, "zookeeper");
        if (!zk.mkdirs()) {
            throw new IllegalStateException("can't make " + zk);
        }
        ServerConfiguration conf = configuration(dir, port);
        conf.setProperty("journalDirectory", conf.getJournalDirName());
        LocalBookKeeper.runZookeeper(100, port, zk);
        // makes BookKeeper's tree, and no bookie
        new LocalBookKeeper(0, conf, new File(dir, "conf").getPath(), false, "bench", "127.0.0.1", port).start();
    }

    private static int freePort() throws Exception {
        try (ServerSocket socket = new ServerSocket(0)) {
            return socket.getLocalPort();
        }
    }

    private static long cpuNanos() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
            .getProcessCpuTime();
    }
}
