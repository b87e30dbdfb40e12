"""Ask questions of an Iceberg table with Apache Spark, by its catalog in PostgreSQL.

`python ask_spark.py JARS URL USER < QUESTIONS > ANSWERS`. The password is in
PGPASSWORD, or in the file PGPASSFILE.
"""

from __future__ import annotations

import json
import os
import sys

from pyspark.sql import SparkSession


def main() -> None:
    jars, url, user = sys.argv[1:]
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.jars", jars)
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.extensions", "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
        .getOrCreate()
    )
    given = {"type": "jdbc", "uri": url, "jdbc.user": user}
    if password := os.environ.get("PGPASSWORD"):
        given["jdbc.password"] = password
    spark.conf.set("spark.sql.catalog.outbox", "org.apache.iceberg.spark.SparkCatalog")
    for name, value in {**given, "jdbc.schema-version": "V1", "warehouse": "/nowhere"}.items():
        spark.conf.set(f"spark.sql.catalog.outbox.{name}", value)
    events = spark.sql("SELECT *, CAST(created_at AS DATE) AS event_date FROM outbox.outbox.events")
    events.createOrReplaceTempView("events")
    json.dump([_answer(spark, sql) for sql in json.load(sys.stdin)], sys.stdout, default=str)


def _answer(spark: SparkSession, sql: str) -> object:
    try:
        return [list(row) for row in spark.sql(sql).collect()]
    except Exception as error:  # noqa: BLE001 - the test compares it
        return str(error)


main()
