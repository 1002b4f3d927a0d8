"""The metadata and sessions ports over ZooKeeper."""
