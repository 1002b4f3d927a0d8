package tierlog.peers;

import io.pravega.common.util.ByteArraySegment;
import io.pravega.segmentstore.storage.cache.DirectMemoryCache;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Locale;
import java.util.Random;

/**
 * The work of bench_cache.py on Pravega's cache: PASSES LIMIT COUNT ENTRY_SIZE LARGE_COUNT cpu|wall.
 *
 * <p>For each pass it prints one JSON object on stdout: seconds of each test, and the peak of memory.
 * Entries are pieces of one source, each at another place; a get copies into one target.
 */
public final class PravegaCache {
    private static final int SOURCE_LEN = 8 << 20;
    private static final int MIB = 1 << 20;
    private static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();

    private final byte[] source = new byte[SOURCE_LEN];
    private final byte[] target = new byte[MIB];
    private final DirectMemoryCache cache;
    private final boolean cpu;

    private PravegaCache(long limit, boolean cpu) {
        this.cache = new DirectMemoryCache(limit);
        this.cpu = cpu;
        new Random(1).nextBytes(source);
    }

    public static void main(String[] args) throws Exception {
        int passes = Integer.parseInt(args[0]);
        int count = Integer.parseInt(args[2]);
        int size = Integer.parseInt(args[3]);
        int large = Integer.parseInt(args[4]);
        PravegaCache bench = new PravegaCache(Long.parseLong(args[1]), args[5].equals("cpu"));
        for (int pass = 0; pass < passes; pass++) {
            double[] small = bench.sequential(count, size);
            double random10 = bench.mixed(count, 10 * 1024);
            double random100 = bench.mixed(count, 100 * 1024);
            double[] whole = bench.sequential(large, MIB);
            System.out.printf(
                    Locale.ROOT,
                    "{\"insert\": %.9f, \"get\": %.9f, \"delete\": %.9f, \"random_10\": %.9f,"
                            + " \"random_100\": %.9f, \"insert_1m\": %.9f, \"get_1m\": %.9f,"
                            + " \"delete_1m\": %.9f, \"rss_peak_bytes\": %d}%n",
                    small[0], small[1], small[2], random10, random100, whole[0], whole[1], whole[2],
                    peakBytes());
        }
        bench.cache.close();
    }

    private double now() {
        return (cpu ? THREADS.getCurrentThreadCpuTime() : System.nanoTime()) / 1e9;
    }

    private int put(int at, int length) {
        return cache.insert(new ByteArraySegment(source, at, length));
    }

    private int read(int address) {
        return cache.get(address).copyTo(ByteBuffer.wrap(target));
    }

    /** Puts all in, reads all, deletes all; seconds of each. */
    private double[] sequential(int count, int size) {
        int[] addresses = new int[count];
        double start = now();
        for (int number = 0; number < count; number++) {
            addresses[number] = put(number % 1000 * 64, size);
        }
        double inserted = now();
        long bytes = 0;
        for (int address : addresses) {
            bytes += read(address);
        }
        double got = now();
        for (int address : addresses) {
            cache.delete(address);
        }
        double done = now();
        if (bytes != (long) count * size) {
            throw new IllegalStateException("read " + bytes + " bytes");
        }
        return new double[] {inserted - start, got - inserted, done - got};
    }

    /** Does the random mix; seconds of it. What is left is deleted outside the time. */
    private double mixed(int count, int size) {
        Random random = new Random(7);
        boolean[] puts = new boolean[count];
        double[] picks = new double[count];
        int[] lengths = new int[4096];
        for (int number = 0; number < count; number++) {
            puts[number] = random.nextDouble() < 0.6;
            picks[number] = random.nextDouble();
        }
        for (int number = 0; number < lengths.length; number++) {
            lengths[number] = random.nextInt(size);
        }
        int[] addresses = new int[count];
        int live = 0;
        double start = now();
        for (int number = 0; number < count; number++) {
            if (puts[number] || live == 0) {
                addresses[live++] = put(number % 4096 * 64, lengths[number % 4096]);
            } else {
                int at = (int) (picks[number] * live);
                cache.delete(addresses[at]);
                addresses[at] = addresses[--live];
            }
            if (live > 0) {
                read(addresses[(int) (picks[count - 1 - number] * live)]);
            }
        }
        double seconds = now() - start;
        for (int number = 0; number < live; number++) {
            cache.delete(addresses[number]);
        }
        return seconds;
    }

    private static long peakBytes() throws Exception {
        for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
            if (line.startsWith("VmHWM:")) {
                return Long.parseLong(line.replaceAll("[^0-9]", "")) * 1024;
            }
        }
        throw new IllegalStateException("no VmHWM");
    }
}
