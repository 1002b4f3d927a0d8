"""The cache port over Redis."""
