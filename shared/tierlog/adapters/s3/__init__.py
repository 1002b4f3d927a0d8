"""The objects port over S3 and what speaks its protocol."""

from tierlog.adapters.s3.store import S3ObjectStore, open_s3

__all__ = ["S3ObjectStore", "open_s3"]
