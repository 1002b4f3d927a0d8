"""Pure codecs of everything that is kept on disk or in the object store."""
