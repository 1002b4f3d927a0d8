"""The attribute index: a B+Tree on media that only grow, and where it lies in tier 2."""
