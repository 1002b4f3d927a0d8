"""The files port over the local disk."""

from tierlog.adapters.files.disk import DiskFiles

__all__ = ["DiskFiles"]
