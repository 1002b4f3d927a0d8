"""Protocols only: what the rooms ask of clocks, disks, networks and servers."""
