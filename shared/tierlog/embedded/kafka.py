"""Kafka: one KRaft node, broker and controller. A hint, never the truth: it may come back empty.

The ready check is one DescribeCluster request (API 60, version 0): a broker that takes
connections but is still fenced lists no broker in its answer.
"""

import base64
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from tierlog.embedded.java import LOG4J, SMALL_JVM, class_path, find_java, pyspark_jars
from tierlog.embedded.kafka_jars import expected, kafka_jars
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.process import Child, Launch, log_tail
from tierlog.embedded.server import NotReadyError, Place, Server, ask, child_environment
from tierlog.model.errors import RetryableError
from tierlog.ports.progress import Progress

FLAGS: Final = ("-Xms64m", "-Xmx256m", "-Dlog4j2.configurationFile=log4j2.properties")
# Kafka's own slf4j-api 1.7 has no binding among its jars; PySpark has 2.0 with one for log4j.
LOG_JARS: Final = ("slf4j-api-2*", "log4j-slf4j2*")
SLF4J_REPLACED: Final = "slf4j-api-1"

CONFIG: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=PLAINTEXT://{host}:{broker},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{broker}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs=data
num.partitions=1
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
num.network.threads=2
num.io.threads=2
log.cleaner.dedupe.buffer.size=8388608
log.segment.bytes=67108864
log.index.size.max.bytes=1048576
# After a SIGKILL the new broker waits until the session of the old one has ended.
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
"""

# Header version 2: API 60, version 0, correlation 1, no client id, no tags; then no rights, no tags
DESCRIBE_CLUSTER: Final = struct.pack(">hhihBBB", 60, 0, 1, -1, 0, 0, 0)


class Kafka(Server):
    """One Kafka node."""

    name = "kafka"
    port_purposes: ClassVar[Sequence[str]] = ("broker", "controller")
    stop_s_max = 15.0

    async def prepare(self, place: Place, progress: Progress) -> Launch:
        java = find_java(place.environ)
        jars = await kafka_jars(java, place.environ, progress)
        ports = {name: place.ports[name] for name in self.port_purposes}
        config = CONFIG.format(host=LOOPBACK, **ports)
        (place.data / "server.properties").write_text(config, encoding="utf-8")
        (place.data / "log4j2.properties").write_text(LOG4J, encoding="utf-8")
        temporary = f"-Djava.io.tmpdir={place.scratch()}"
        argv = [str(java), *SMALL_JVM, *FLAGS, temporary, "-cp", broker_class_path(jars)]
        environ = child_environment(place.environ)
        if not (place.data / "data" / "meta.properties").exists():
            await _format(argv, place, environ)
        argv += ["kafka.Kafka", "server.properties"]
        return Launch(argv=argv, cwd=place.data, log=place.log, env=environ)

    async def check_ready(self, place: Place) -> None:
        framed = struct.pack(">i", len(DESCRIBE_CLUSTER)) + DESCRIBE_CLUSTER
        answer = await ask(place.ports["broker"], framed)
        if count_brokers(answer) < 1:
            raise NotReadyError("the broker is not registered yet")


def broker_class_path(jars: Path) -> str:
    """Join the jars, with a binding for their log."""
    own = [str(jars / name) for name in expected() if not name.startswith(SLF4J_REPLACED)]
    return ":".join([*class_path(pyspark_jars(), LOG_JARS), *own])


async def _format(java: list[str], place: Place, environ: dict[str, str]) -> None:
    """Give an empty or half formatted data folder a cluster id."""
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    # With "=", since an id may start with "-".
    argv = [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}"]
    argv += ["-c", "server.properties", "--ignore-formatted"]
    launch = Launch(argv=argv, cwd=place.data, log=place.log, env=environ)
    child = Child.spawn("kafka-format", launch, run_dir=place.data)
    try:
        exit_code = await child.wait()
    finally:
        if child.running:
            child.kill()
    if exit_code != 0:
        raise RetryableError(
            f"Kafka's storage could not be formatted: {log_tail(place.log)}",
            remedy=f"Look into {place.log}; when {place.data} is damaged, remove it",
        )


def count_brokers(answer: bytes) -> int:
    """Read the number of brokers in an answer to DescribeCluster version 0, 0 when there is none.

    offset  size  field
         0     4  size of what follows
         4     4  correlation id
         8     1  tags, 0
         9     4  throttle time
        13     2  error code
        15     v  error message, length + 1 as varint, 0: none
         …     v  cluster id, length + 1 as varint
         …     4  controller id
         …     v  number of brokers + 1 as varint
    """
    if len(answer) < 16 or struct.unpack_from(">h", answer, 13)[0] != 0:
        return 0
    offset = 15
    for _text in ("error message", "cluster id"):
        # Lengths below 127 are one byte; a cluster id has 22 characters.
        length = max(answer[offset] - 1, 0) if offset < len(answer) else 0
        offset += 1 + length
    offset += 4
    return answer[offset] - 1 if offset < len(answer) else 0
