"""Real S3, ZooKeeper, Kafka and Redis servers and the services on one machine."""
