"""Tierlog's own services as clients see them: gRPC for small calls, HTTP for runs."""
