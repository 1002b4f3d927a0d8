"""Looking at a storage node's files while no node has them, without changing a byte."""
