"""Serves any position of a stream from whichever tier holds it."""
