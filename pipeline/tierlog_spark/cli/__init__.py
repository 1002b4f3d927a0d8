"""The commands of the jobs: ``tierlog spark …``. PySpark is imported when one runs."""
