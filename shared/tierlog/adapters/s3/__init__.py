"""The objects port over S3."""
