"""The command line, noun then verb."""
