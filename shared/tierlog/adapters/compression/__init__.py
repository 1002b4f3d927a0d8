"""The events of an entry, compressed and decompressed; a module for each library."""
