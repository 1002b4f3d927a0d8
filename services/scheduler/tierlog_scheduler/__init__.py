"""Decides what is offloaded, trimmed and cleaned; moves no data."""
