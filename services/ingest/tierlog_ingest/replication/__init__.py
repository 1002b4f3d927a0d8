"""Auto-recovery: ledgers that lack copies are found, and made whole (ADR-0016)."""
