"""What the rest needs from outside, as Protocols; adapters implement them, tests twin them.

Every port says which errors it raises. A port that can lose an answer raises
``IndeterminateError`` for a change whose outcome is unknown, and nothing else does.
"""
