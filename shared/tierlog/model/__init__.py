"""The vocabulary every room shares: pure values, their checks, and their transition tables."""
