"""PySpark data source and jobs over tier 2."""
