"""Owner of streams and storage node of ledgers."""
