"""Memory twins of every port, for tests and simulation."""
