"""The storage node's commands: ``tierlog node``, ``journal``, ``entrylog`` and ``doctor``."""
