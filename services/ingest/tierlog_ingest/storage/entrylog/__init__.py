"""Entry logs: shared files of runs, and the map of ledgers at the end of each."""
