"""Builds adapters from settings; the only room that chooses them."""
