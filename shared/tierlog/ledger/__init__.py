"""The ledger's client: where entries go, how they are confirmed, recovered and read back.

Owns placement, the quorum writer, fencing and recovery, and the reading of tier 1. Does not own
who may write (``tierlog_ingest.streams`` does), nor any metadata (``tierlog.catalog`` does), nor
what a storage node does with a run.
"""
