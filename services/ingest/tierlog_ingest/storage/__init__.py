"""The storage node: keeper of entries (seeds/003; protocols.md section 2)."""
