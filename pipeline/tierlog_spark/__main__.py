"""``python -m tierlog_spark JOB …`` is ``tierlog spark JOB …``; also what spark-submit is given."""

from tierlog_spark.cli.main import app

if __name__ == "__main__":
    app(prog_name="tierlog spark")
