"""Settings of security: on by default, refused by name when something is missing, never shown."""

from __future__ import annotations

import logging

import pytest
from pydantic import ValidationError

from tests.security.making import Authority
from tierlog.adapters.kafka.common import connection_of as kafka_connection
from tierlog.adapters.redis.cache import connection_of as redis_connection
from tierlog.adapters.redis.cache import digest_key, url_of
from tierlog.adapters.zookeeper.metadata import connection_of as zookeeper_connection
from tierlog.model.errors import RefusedError
from tierlog.runtime.redaction import MASK, process_redactor
from tierlog.runtime.security import SecuritySettings, TlsSettings, secret_text
from tierlog.runtime.security_check import check_endpoint, check_security
from tierlog.runtime.settings import (
    KafkaSettings,
    RedisSettings,
    Settings,
    ZooKeeperSettings,
    load_settings,
)
from tierlog.wiring.security import calling_of, protection_of, wire_credentials

SERVICES = ("ingest", "reader", "offloader", "scheduler")


@pytest.fixture
def whole(tmp_path):
    """Settings of a deployment that may start."""
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    return {
        "security": {
            "tls": {
                "certificate_file": str(issued.certificate),
                "key_file": str(issued.key),
                "ca_file": str(authority.file),
                "client_certificates": "required",
            }
        },
        "kafka": {"tls": {"enabled": True}},
        "zookeeper": {"tls": {"enabled": True}},
        "redis": {"url": "rediss://redis:6379/0"},
    }


def settings_of(values, **more):
    return Settings.model_validate({**values, **more})


@pytest.mark.parametrize("service", SERVICES)
def test_without_settings_a_service_does_not_start_open(service):
    with pytest.raises(RefusedError, match="certificate_file is not set") as caught:
        check_security(Settings(), service)
    assert "TIERLOG_SECURITY__TLS__CERTIFICATE_FILE" in caught.value.remedy
    assert "TIERLOG_SECURITY__MODE=open" in caught.value.remedy
    with pytest.raises(RefusedError, match="certificate_file is not set"):
        protection_of(Settings())


@pytest.mark.parametrize("service", SERVICES)
def test_open_is_said_and_not_in_production(service):
    said = settings_of({"security": {"mode": "open"}})
    check_security(said, service)
    protection = protection_of(said)
    assert protection.gate is None
    assert protection.tls is None
    for profile in ("embedded", "development"):
        check_security(said.model_copy(update={"profile": profile}), service)
    with pytest.raises(RefusedError, match=r"security.mode is open, and profile is production"):
        check_security(said.model_copy(update={"profile": "production"}), service)


@pytest.mark.parametrize("service", SERVICES)
def test_a_whole_deployment_starts_also_in_production(whole, service):
    for profile in (None, "production"):
        settings = settings_of(whole, profile=profile)
        check_security(settings, service)
        assert protection_of(settings).gate is not None


@pytest.mark.parametrize(
    ("service", "system"),
    [("ingest", "zookeeper"), ("reader", "redis"), ("offloader", "kafka"), ("scheduler", "kafka")],
)
def test_outer_systems_are_not_reached_in_plain_text_unless_that_is_said(whole, service, system):
    plain = {"redis": {"url": "redis://redis:6379/0"}}.get(system, {})
    settings = settings_of(whole, **{system: plain})
    with pytest.raises(RefusedError, match=f"{system} is reached in plain text"):
        check_security(settings, service)
    security = {**whole["security"], "plain_text_to": [system]}
    check_security(settings_of(whole, security=security, **{system: plain}), service)


@pytest.mark.parametrize("service", SERVICES)
def test_entries_go_to_the_store_over_tls_unless_that_is_said(whole, service):
    far = {"endpoint_url": "http://10.0.0.5:9000"}
    with pytest.raises(RefusedError, match="s3 is reached in plain text"):
        check_security(settings_of(whole, s3=far), service)
    meshed = {**whole["security"], "plain_text_to": ["s3"]}
    check_security(settings_of(whole, s3=far, security=meshed), service)
    for fine in ("", "https://10.0.0.5:9", "http://127.0.0.1:8333", "http://localhost:8333"):
        check_security(settings_of(whole, s3={"endpoint_url": fine}), service)


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_collector_is_shown_goes_over_tls(whole, service):
    def tracing(url, **more):
        return {"enabled": True, "endpoint_url": url, "headers": "authorization=Bearer x", **more}

    far = "http://collector:4318/v1/traces"
    with pytest.raises(RefusedError, match=r"tracing.headers would be sent in plain text"):
        check_security(settings_of(whole, tracing=tracing(far)), service)
    for fine in (
        tracing("https://collector:4318/v1/traces"),
        tracing("http://127.0.0.1:4318/v1/traces"),
        tracing("http://localhost:4318/v1/traces"),
        tracing(far, headers=None),
        tracing(far, enabled=False),
    ):
        check_security(settings_of(whole, tracing=fine), service)
    meshed = {**whole["security"], "plain_text_to": ["collector"]}
    check_security(settings_of(whole, tracing=tracing(far), security=meshed), service)


def test_who_asks_must_be_knowable(whole):
    tls = {**whole["security"]["tls"], "client_certificates": "none"}
    with pytest.raises(RefusedError, match="nobody could say who it is"):
        check_security(settings_of(whole, security={"tls": tls}), "ingest")


def test_the_secret_of_the_open_mode_is_refused_where_it_would_do_nothing(whole):
    with pytest.raises(RefusedError, match=r"wire\.token"):
        check_security(settings_of(whole, wire={"token": "hush"}), "ingest")


@pytest.mark.parametrize(
    "values",
    [
        {"tls": {"certificate_file": "a"}},
        {"tls": {"key_file": "a"}},
        {"tls": {"client_certificates": "required"}},
        {"jwt": {"jwks_file": "a"}},
        {"jwt": {"jwks_file": "a", "issuer": "i", "audience": ""}},
        {"jwt": {"algorithms": ["HS256"]}},
        {"jwt": {"algorithms": ["none"]}},
        {"grants": [{"subject": "alice", "roles": ["admin"]}]},
        {"grants": [{"subject": "token:a", "roles": ["root"]}]},
        {"grants": [{"subject": "token:a", "roles": [], "streams": ["../*"]}]},
        {"grants": [{"subject": "token:a", "roles": []}] * 2},
        {"token": "a", "token_file": "b"},
        {"mode": "off"},
    ],
    ids=range(13),
)
def test_what_makes_no_sense_is_refused(values):
    with pytest.raises(ValidationError):
        SecuritySettings.model_validate(values)


def test_a_client_uses_tls_where_something_of_it_is_set(whole, tmp_path):
    assert calling_of(SecuritySettings()).tls is None
    assert calling_of(SecuritySettings(mode="open")).tls is None
    assert calling_of(SecuritySettings(mode="enforced")).tls is not None
    tls = TlsSettings(ca_file=whole["security"]["tls"]["ca_file"])
    assert calling_of(SecuritySettings(tls=tls)).tls is not None
    assert calling_of(SecuritySettings(tls=tls, mode="open")).tls is None


def test_a_token_comes_from_a_file_that_is_read_again(whole, tmp_path):
    file = tmp_path / "token"
    file.write_text("t0ken-one\n", encoding="utf-8")
    settings = settings_of({"security": {"token_file": str(file)}})
    calling = calling_of(settings.security)
    assert calling.headers() == {"Authorization": "Bearer t0ken-one"}
    show = wire_credentials(settings, calling)
    assert (show().method, show().data) == ("jwt", b"t0ken-one")
    file.write_text("t0ken-two, which is longer\n", encoding="utf-8")
    assert show().data == b"t0ken-two, which is longer"
    file.unlink()
    assert show().data == b"t0ken-two, which is longer"
    with pytest.raises(RefusedError, match="the token can't be read"):
        calling_of(settings.security)


def test_a_secret_of_a_file_is_known_as_a_secret_once_it_was_read(tmp_path):
    file = tmp_path / "secret"
    for text in ("pl4nted-in-a-file", "pl4nted-in-its-next-version"):
        assert process_redactor().text(f"x {text}") == f"x {text}"
        file.write_text(f"{text}\n", encoding="utf-8")
        assert secret_text(None, file, name="redis.secret") == text
        assert process_redactor().text(f"x {text}") == f"x {MASK}"
    file.write_text("pl4nted-token", encoding="utf-8")
    calling_of(settings_of({"security": {"token_file": str(file)}}).security).headers()
    assert process_redactor().text("pl4nted-token") == MASK


def test_the_clusters_secret_is_for_the_open_mode():
    settings = settings_of({"wire": {"token": "hush"}})
    shown = wire_credentials(settings, calling_of(settings.security))()
    assert (shown.method, shown.data) == ("token", b"hush")
    settings = settings_of({"wire": {"token": "hush"}, "security": {"mode": "enforced"}})
    assert wire_credentials(settings, calling_of(settings.security))().data == b""


def test_kafka_is_told_of_tls_and_sasl(tmp_path):
    assert kafka_connection(KafkaSettings()) == {}
    file, ca, certificate, key = (tmp_path / name for name in ("password", "ca", "crt", "key"))
    for each in (file, ca, certificate, key):
        each.write_text("hush\n", encoding="utf-8")
    named = {"ca_file": str(ca), "certificate_file": str(certificate), "key_file": str(key)}
    kafka = KafkaSettings.model_validate(
        {
            "tls": {"enabled": True, **named},
            "sasl": {
                "mechanism": "SCRAM-SHA-512",
                "username": "tierlog",
                "password_file": str(file),
            },
        }
    )
    assert kafka_connection(kafka) == {
        "security.protocol": "SASL_SSL",
        "ssl.endpoint.identification.algorithm": "https",
        "ssl.ca.location": str(ca),
        "ssl.certificate.location": str(certificate),
        "ssl.key.location": str(key),
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "tierlog",
        "sasl.password": "hush",
    }
    plain = KafkaSettings.model_validate(
        {"sasl": {"mechanism": "PLAIN", "username": "u", "password": "p"}}
    )
    assert kafka_connection(plain)["security.protocol"] == "SASL_PLAINTEXT"
    with pytest.raises(RefusedError, match="without a username or password"):
        kafka_connection(KafkaSettings.model_validate({"sasl": {"mechanism": "PLAIN"}}))
    ca.unlink()
    with pytest.raises(RefusedError, match=r"no file.*KAFKA__TLS__CA_FILE"):
        kafka_connection(kafka)


def test_the_kafka_library_takes_it():
    from confluent_kafka import KafkaException, Producer

    kafka = KafkaSettings.model_validate(
        {
            "tls": {"enabled": True},
            "sasl": {"mechanism": "SCRAM-SHA-256", "username": "u", "password": "p"},
        }
    )
    config = {
        "bootstrap.servers": "127.0.0.1:1",
        "error_cb": lambda _error: None,
        **kafka_connection(kafka),
    }
    assert repr(Producer(config, logger=logging.getLogger("test")))
    with pytest.raises(KafkaException):
        Producer({**config, "ssl.ca.location": "/nowhere"})


def test_zookeeper_is_told_of_tls_identity_and_access_lists():
    assert zookeeper_connection(ZooKeeperSettings()) == {}
    told = zookeeper_connection(
        ZooKeeperSettings.model_validate(
            {
                "tls": {"enabled": True, "ca_file": "/ca"},
                "username": "tierlog",
                "password": "hush",
            }
        )
    )
    how = dict(told)
    (acl,) = how.pop("default_acl")
    assert (acl.id.scheme, acl.perms) == ("auth", 31)
    assert how == {
        "use_ssl": True,
        "verify_certs": True,
        "check_hostname": True,
        "ca": "/ca",
        "auth_data": [("digest", "tierlog:hush")],
    }
    for values in ({"username": "a"}, {"password": "b"}):
        with pytest.raises(RefusedError, match="go together"):
            zookeeper_connection(ZooKeeperSettings.model_validate(values))


def test_redis_is_told_of_tls_and_a_user_and_its_url_shows_no_password():
    redis = RedisSettings.model_validate(
        {
            "url": "redis://tierlog:hu%40sh@redis:6379/0",
            "tls": {"enabled": True, "ca_file": "/ca"},
        }
    )
    assert url_of(redis) == "rediss://redis:6379/0"
    assert redis_connection(redis) == {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": "/ca",
        "username": "tierlog",
        "password": "hu@sh",
    }
    assert "hu" not in repr(redis) + redis.model_dump_json()
    assert url_of(RedisSettings(url="redis://redis:6379/0")) == "redis://redis:6379/0"
    assert digest_key(None) == b""
    assert len(digest_key("hush")) == 32


@pytest.mark.parametrize("name", ["kafka.sasl.password", "zookeeper.password", "redis.password"])
def test_a_secret_has_one_place(name, tmp_path):
    file = tmp_path / "secret"
    file.write_text("hush", encoding="utf-8")
    both = {"password": "a", "password_file": str(file), "username": "u"}
    sasl = KafkaSettings.model_validate({"sasl": {"mechanism": "PLAIN", **both}})
    zookeeper = ZooKeeperSettings.model_validate(both)
    redis = RedisSettings.model_validate({"url": "redis://r:1/0", **both})
    connection = {
        "kafka.sasl.password": lambda: kafka_connection(sasl),
        "zookeeper.password": lambda: zookeeper_connection(zookeeper),
        "redis.password": lambda: redis_connection(redis),
    }[name]
    with pytest.raises(RefusedError, match=f"{name} and {name}_file are both set"):
        connection()


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://169.254.170.2:80",
        "http://[fe80::1]:8333",
        "http://[fd00:ec2::254]/",
        "http://[::ffff:169.254.169.254]/",
        "http://metadata.google.internal/",
        "http://METADATA.google.internal./",
        "http://0.0.0.0:8333",
        "http://[::]:8333",
        "http://224.0.0.1",
        "http://100.100.100.200",
        "http://2852039166/latest/meta-data",
        "http://0xa9fea9fe",
        "http://0251.0376.0251.0376",
        "http://169.254.43518:80",
        "http://0:8333",
    ],
)
def test_an_endpoint_is_no_place_where_a_machine_tells_its_secrets(url, whole):
    for production in (False, True):
        with pytest.raises(RefusedError, match="no object store's address"):
            check_endpoint(url, production=production)
    with pytest.raises(RefusedError, match="no object store's address"):
        check_security(settings_of(whole, s3={"endpoint_url": url}), "reader")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8333", "http://[::1]:1", "http://localhost:1", "http://127.1:8333"]
)
def test_the_machine_itself_is_one_outside_production_only(url):
    check_endpoint(url, production=False)
    with pytest.raises(RefusedError):
        check_endpoint(url, production=True)


@pytest.mark.parametrize("url", [None, "https://s3.eu-west-1.amazonaws.com", "http://10.0.0.5:1"])
def test_other_endpoints_are_taken(url):
    check_endpoint(url, production=True)


def test_grants_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(
        "TIERLOG_SECURITY__GRANTS",
        '[{"subject": "token:alice", "roles": ["producer"], "streams": ["orders*"]}]',
    )
    (found,) = load_settings().security.grants
    assert found.grant.includes("orders.eu")
