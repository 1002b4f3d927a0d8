"""The files port over the local file system."""
