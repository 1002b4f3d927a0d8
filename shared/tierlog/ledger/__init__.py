"""The replicated ledger's client: placement, quorum writer, reader, recovery."""
