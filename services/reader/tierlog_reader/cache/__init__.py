"""The streaming cache: memory for ranges of ledgers and objects, bounded to the byte (ADR-0026)."""
