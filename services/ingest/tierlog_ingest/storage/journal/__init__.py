"""The journal: what is written before it is answered."""
