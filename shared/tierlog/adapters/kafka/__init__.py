"""The events port over Kafka."""
