"""Tiered log storage: formats, client and command line."""
