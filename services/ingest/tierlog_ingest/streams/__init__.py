"""Owned streams: claiming, the append pipeline, roll-over, stepping down (protocols.md section 1).

Owns the decision which ledger an append goes to and what its producer is told. Does not own how
runs become durable (``tierlog.ledger`` and the storage nodes do), nor the metadata's transactions.
"""
