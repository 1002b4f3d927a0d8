# %% [markdown]
"""What 30 years of changelogs say: a notebook as a script, whose cells begin with ``# %%``.

    tierlog up                                    # and in another terminal:
    python docs/examples/changelog_records.py | tierlog append changelogs --format ndjson
    tierlog stream seal changelogs
    tierlog offload run changelogs --wait
    pip install 'tierlog-spark[plots]'
    python docs/examples/changelogs.py            # writes two plots into this folder

In a notebook with a session of its own, ``spark`` is that one, once ``register(spark)`` was said.
"""

# %% [markdown]
# A Spark session, and where the bucket is: what the settings say, or ``tierlog up``.

# %%
import os
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from tierlog.cli.objects import load_s3
from tierlog_spark.local import local_session, spark_environment
from tierlog_spark.options import place_options

OUT = Path(os.environ.get("PLOTS", "."))


def own_session() -> SparkSession:
    """Start Spark on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="changelogs-"))
    os.environ.update(spark_environment(folder, os.environ))
    return local_session(folder, cores=os.cpu_count() or 1, memory_mb=1024)


spark: SparkSession = globals().get("spark") or own_session()

# %% [markdown]
# The stream straight out of the bucket: one row for each event, of which only the payload is
# wanted. The payload is JSON.

# %%
events = (
    spark.read.format("tierlog")
    .options(**place_options(load_s3().s3))
    .option("stream", "changelogs")
    .option("columns", "payload")
    .load()
)
schema = "package STRING, version STRING, time_ms BIGINT, text STRING"
uploads = (
    events.select(fn.from_json(fn.col("payload").cast("string"), schema).alias("upload"))
    .select("upload.*")
    .withColumn("year", fn.year(fn.timestamp_millis("time_ms")))
    .withColumn("words", fn.size(fn.split(fn.trim("text"), r"\s+")))
    .withColumn("text", fn.lower("text"))
)

# %% [markdown]
# What an upload may be about: the share of changelogs of a year that say so.

# %%
TOPICS = {
    "a new upstream release": r"new upstream|new .*release",
    "a bug of the tracker": r"closes: *(bug)?#?\d",
    "security": r"cve-\d|security",
    "translations": r"translation|po-debconf|debconf template",
    "standards and lintian": r"standards-version|lintian|debhelper",
}
shares = [fn.avg(fn.col("text").rlike(pattern).cast("int")) for pattern in TOPICS.values()]
years = (
    uploads.groupBy("year")
    .agg(
        fn.count("*").alias("uploads"),
        fn.count_distinct("package").alias("packages"),
        fn.percentile_approx("words", 0.5).alias("words"),
        *(share.alias(topic) for topic, share in zip(TOPICS, shares, strict=True)),
    )
    .orderBy("year")
    .collect()
)

total = sum(row["uploads"] for row in years)
busiest = max(years, key=lambda row: int(row["uploads"]))
print(f"{total} uploads from {years[0]['year']} to {years[-1]['year']}")
print(f"the busiest year was {busiest['year']}: {busiest['uploads']} uploads")


# %% [markdown]
# The first plot: how much was uploaded, and how much was said about it.


# %%
def column(name: str) -> list[Any]:
    """Return one column of the years."""
    return [row[name] for row in years]


def saved(figure: Figure, name: str) -> Path:
    """Write a plot."""
    path = OUT / name
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")
    return path


figure = Figure(figsize=(10, 5), layout="constrained")
axes = figure.subplots()
axes.bar(column("year"), column("uploads"), color="#4c78a8", label="uploads")
axes.set_xlabel("year")
axes.set_ylabel("uploads of the packages that are installed here")
right = axes.twinx()
right.plot(column("year"), column("words"), color="#e45756", marker="o", label="words")
right.set_ylabel("words in a changelog, the median")
right.set_ylim(bottom=0)
axes.set_title(f"{total} changelogs: uploads (bars), and words for each (line)")
saved(figure, "changelogs-by-year.png")

# %% [markdown]
# The second one: what they were about.

# %%
figure = Figure(figsize=(10, 5), layout="constrained")
axes = figure.subplots()
for topic in TOPICS:
    axes.plot(column("year"), column(topic), marker=".", label=topic)
axes.set_xlabel("year")
axes.set_ylabel("share of the year's changelogs")
axes.yaxis.set_major_formatter(PercentFormatter(1.0))
axes.set_ylim(bottom=0)
figure.legend(loc="outside lower center", ncols=len(TOPICS))
axes.set_title("What changelogs are about")
saved(figure, "changelogs-by-topic.png")
