"""Attributes of an owned stream: checked before an append is sent, kept, rebuilt (ADR-0027)."""
