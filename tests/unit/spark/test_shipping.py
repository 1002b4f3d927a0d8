"""Tasks get the secrets that they use, and no others."""

import json
import pickle

from pydantic import SecretStr, TypeAdapter

from tierlog.runtime.settings import RedisSettings, S3Settings, Settings, ZooKeeperSettings
from tierlog_spark.shipping import WITH_SECRETS, shipped
from tierlog_spark.write_options import parse_write_options

PLANTED = Settings.model_construct(
    s3=S3Settings(access_key="id", secret_key=SecretStr("planted-s3"), bucket="b"),
    redis=RedisSettings(password=SecretStr("planted-redis")),
    zookeeper=ZooKeeperSettings(hosts="z:1", password=SecretStr("planted-zookeeper")),
)


def test_every_section_with_a_secret_is_known():
    found = {
        name
        for name, field in Settings.model_fields.items()
        if '"writeOnly": true' in json.dumps(TypeAdapter(field.rebuild_annotation()).json_schema())
    }
    assert found <= WITH_SECRETS


def test_a_write_carries_neither_the_buckets_keys_nor_the_caches_password():
    pickled = pickle.dumps(parse_write_options({"stream": "s"}, PLANTED, streaming=True))
    assert b"planted-zookeeper" in pickled
    assert b"planted-s3" not in pickled
    assert b"planted-redis" not in pickled


def test_what_is_used_is_as_it_was():
    found = shipped(PLANTED, "s3")
    assert (found.s3, found.client) == (PLANTED.s3, PLANTED.client)
    assert found.zookeeper == ZooKeeperSettings()
