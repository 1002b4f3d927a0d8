"""Generated from shared/proto/tierlog/v1; not edited by hand."""
