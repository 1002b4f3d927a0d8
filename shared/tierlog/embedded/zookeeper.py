"""ZooKeeper: the server in PySpark's own jars. Keeps the metadata, so every change is fsynced."""

from collections.abc import Sequence
from typing import ClassVar, Final

from tierlog.embedded.java import LOG4J, SMALL_JVM, class_path, find_java, pyspark_jars
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.process import Launch
from tierlog.embedded.server import NotReadyError, Place, Server, ask, child_environment
from tierlog.ports.progress import Progress

JARS: Final = (
    "zookeeper-3*", "zookeeper-jute-*",
    "netty-buffer*", "netty-codec-base*", "netty-codec-4*", "netty-common*", "netty-handler-4*",
    "netty-resolver-4*", "netty-transport-4*", "netty-transport-native-unix*",
    "netty-transport-native-epoll*linux-x86_64*", "netty-transport-classes-epoll*",
    "slf4j-api*", "log4j-api-2*", "log4j-core*", "log4j-slf4j2*",
    "metrics-core-4*", "snappy-java*", "commons-io-*", "commons-cli*",
)  # fmt: skip
FLAGS: Final = (
    "-Xms16m",
    "-Xmx128m",
    "-Dzookeeper.admin.enableServer=false",
    "-Dzookeeper.jmx.log4j.disable=true",
    "-Dzookeeper.4lw.commands.whitelist=srvr,ruok,mntr",
    "-Dlog4j2.configurationFile=log4j2.properties",
)
# A session of 1 to 10 s: two to twenty ticks. forceSync is on by default and stays so.
TICK_MS: Final = 500


class ZooKeeper(Server):
    """One standalone ZooKeeper."""

    name = "zookeeper"
    port_purposes: ClassVar[Sequence[str]] = ("client",)
    stop_s_max = 10.0

    async def prepare(self, place: Place, progress: Progress) -> Launch:
        config = {
            "tickTime": TICK_MS,
            "dataDir": "./data",
            "clientPort": place.ports["client"],
            "clientPortAddress": LOOPBACK,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "autopurge.purgeInterval": 1,
            "autopurge.snapRetainCount": 3,
            "preAllocSize": 4096,
            "extendedTypesEnabled": "true",
        }
        lines = "".join(f"{key}={value}\n" for key, value in config.items())
        (place.data / "zoo.cfg").write_text(lines, encoding="utf-8")
        (place.data / "log4j2.properties").write_text(LOG4J, encoding="utf-8")
        java = find_java(place.environ)
        temporary = f"-Djava.io.tmpdir={place.scratch()}"
        jars = ":".join(class_path(pyspark_jars(), JARS))
        argv = [str(java), *SMALL_JVM, *FLAGS, temporary, "-cp", jars]
        argv += ["org.apache.zookeeper.server.quorum.QuorumPeerMain", "./zoo.cfg"]
        environ = child_environment(place.environ)
        return Launch(argv=argv, cwd=place.data, log=place.log, env=environ)

    async def check_ready(self, place: Place) -> None:
        answer = await ask(place.ports["client"], b"srvr")
        if b"Mode:" not in answer:
            raise NotReadyError(f"ZooKeeper answered srvr with {answer[:80]!r}")
