"""What producers and replicas write: length-prefixed frames beside a header."""
