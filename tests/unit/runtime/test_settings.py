"""One tree of settings: precedence, names, bounds, and secrets that never print."""

import base64
import traceback
from pathlib import Path

import pytest

from tierlog.embedded.services import SERVICE_PORTS
from tierlog.model.errors import RefusedError
from tierlog.runtime.sections import KAFKA_SESSION_S
from tierlog.runtime.settings import KafkaSettings, S3Settings, Settings, key_bytes, load_settings
from tierlog.wiring.keys import ledger_keys


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("TIERLOG_")]:
        monkeypatch.delenv(name)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tierlog.toml"
    path.write_text(text)
    return path


def test_environment_before_file_before_defaults(tmp_path, monkeypatch):
    path = _file(tmp_path, "[s3]\nbucket = 'from-file'\nregion = 'eu-1'\n")
    monkeypatch.setenv("TIERLOG_S3__BUCKET", "from-environment")
    settings = load_settings(path)
    assert (settings.s3.bucket, settings.s3.region) == ("from-environment", "eu-1")
    assert settings.s3.connections_max == S3Settings().connections_max
    assert Settings(s3=S3Settings(bucket="argument")).s3.bucket == "argument"


def test_a_setting_two_levels_down_has_a_variable(monkeypatch):
    monkeypatch.setenv("TIERLOG_INGEST__LISTEN__WIRE_PORT", "4101")
    assert load_settings().ingest.listen.wire_port == 4101


@pytest.mark.parametrize("section", sorted(SERVICE_PORTS))
def test_a_service_has_settings_for_the_ports_that_it_listens_on_and_no_others(
    monkeypatch, section
):
    for purpose in ("http", "grpc", "wire"):
        name = f"TIERLOG_{section.upper()}__LISTEN__{purpose.upper()}_PORT"
        with monkeypatch.context() as patched:
            patched.setenv(name, "4101")
            if purpose in SERVICE_PORTS[section]:
                listen = getattr(load_settings(), section).listen
                assert getattr(listen, f"{purpose}_port") == 4101
            else:
                with pytest.raises(RefusedError) as caught:
                    load_settings()
                assert name in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIERLOG_S3__ENDPOINT_URL", "ftp://store:9000"),
        ("TIERLOG_S3__ENDPOINT_URL", "store:9000"),
        ("TIERLOG_S3__BUKCET", "x"),
        ("TIERLOG_S3__CONNECTIONS_MAX", "0"),
        ("TIERLOG_SCHEDULER__REREAD_S", "0"),
        ("TIERLOG_READER__RESPONSE_BYTES_MAX", "4"),
        ("TIERLOG_KAFKA__PUBLISH_TIMEOUT_S", "0"),
        ("TIERLOG_INGEST__LISTEN__HTTP_PORT", "65536"),
        ("TIERLOG_WIRE__FRAME_BYTES_MAX", "much"),
        ("TIERLOG_LOG__LEVEL", "loud"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_the_variables_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(RefusedError) as caught:
        load_settings()
    assert name in caught.value.remedy


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("INGEST__OWNER", '{"ack_quorum": 2, "write_quorum": 1}'),
        ("INGEST__STORAGE", '{"free_bytes_min": 2, "free_bytes_resume": 1}'),
        ("WIRE", '{"frame_bytes_max": 1000, "header_bytes_max": 1000}'),
    ],
)
def test_values_that_contradict_each_other_are_refused_at_the_start(monkeypatch, section, values):
    monkeypatch.setenv(f"TIERLOG_{section}", values)
    with pytest.raises(RefusedError):
        load_settings()


@pytest.mark.parametrize("seconds", [0, 5.9])
def test_an_interval_that_the_queues_client_would_refuse_is_refused_with_the_reason(
    monkeypatch, seconds
):
    monkeypatch.setenv("TIERLOG_KAFKA__POLL_INTERVAL_MAX_S", str(seconds))
    with pytest.raises(RefusedError, match="session"):
        load_settings()
    assert KafkaSettings(poll_interval_max_s=KAFKA_SESSION_S).poll_interval_max_s == 6


def test_a_section_that_is_no_json_is_refused(monkeypatch):
    monkeypatch.setenv("TIERLOG_S3", "not json")
    with pytest.raises(RefusedError, match="TIERLOG_S3__BUCKET"):
        load_settings()


def test_a_file_that_is_not_there_is_not_ignored(tmp_path):
    with pytest.raises(RefusedError, match="does not exist"):
        load_settings(tmp_path / "nowhere.toml")


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    with pytest.raises(RefusedError, match="is not TOML"):
        load_settings(_file(tmp_path, "[s3\n"))


def test_an_unknown_name_in_the_file_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"s3\.bukcet"):
        load_settings(_file(tmp_path, "[s3]\nbukcet = 'x'\n"))


def test_a_section_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    with pytest.raises(RefusedError, match=r"\[schedular\] in .* sets nothing") as caught:
        load_settings(_file(tmp_path, "[schedular]\ninterval_s = 1\n"))
    assert "scheduler" in caught.value.remedy
    for name in ("TIERLOG_OFLOADER__PARTS_IN_FLIGHT_MAX", "TIERLOG_S3_BUCKET"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with pytest.raises(RefusedError, match=f"{name} sets nothing"):
                load_settings()
    monkeypatch.setenv("TIERLOG_OF_SOMEBODY_ELSE", "1")
    load_settings()


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "tierlog.toml"
    path.write_bytes(b"\xff\xfe[s3]")
    with pytest.raises(RefusedError, match="is not TOML"):
        load_settings(path)


def test_secrets_do_not_print(monkeypatch):
    monkeypatch.setenv("TIERLOG_S3__SECRET_KEY", "hush-hush")
    monkeypatch.setenv("TIERLOG_WIRE__TOKEN", "hush-hush")
    settings = load_settings()
    assert settings.s3.secret_key is not None
    assert settings.s3.secret_key.get_secret_value() == "hush-hush"
    assert "hush-hush" not in repr(settings) + str(settings) + settings.model_dump_json()


SECRET = base64.b64encode(bytes(range(32))).decode()


def test_keys_of_ledgers_come_from_environment_and_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERLOG_KEYS__K1", SECRET)
    monkeypatch.setenv("TIERLOG_INGEST__OWNER__LEDGER_KEY_ID", "k1")
    settings = load_settings()
    assert key_bytes(settings.keys["k1"]) == bytes(range(32))
    assert settings.ingest.owner.ledger_key_id == "k1"
    both = load_settings(_file(tmp_path, f"[keys]\nk2 = '{SECRET}'\n"))
    assert sorted(both.keys) == ["k1", "k2"]
    assert repr(ledger_keys(both)) == "<LedgerKeys ['k1', 'k2']>"
    assert Settings().ingest.owner.ledger_key_id == "k1"


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        ("not base64 at all, nor is it secret", "this is not"),
        (SECRET[:-4], "32 bytes at least, this has 30"),
        ("", "this has 0"),
    ],
)
def test_a_key_that_is_none_is_refused_and_not_shown(monkeypatch, secret, says):
    monkeypatch.setenv("TIERLOG_KEYS__K1", secret)
    with pytest.raises(RefusedError, match=says) as caught:
        load_settings()
    assert "keys.k1" in str(caught.value)
    assert "TIERLOG_KEYS__K1" in caught.value.remedy
    if secret:
        assert secret not in "".join(traceback.format_exception(caught.value))


def test_keys_are_in_nothing_that_is_printed(monkeypatch):
    monkeypatch.setenv("TIERLOG_KEYS__K1", SECRET)
    settings = load_settings()
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        assert SECRET not in text


def test_a_key_id_that_nobody_could_set_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"keys\.Upper"):
        load_settings(_file(tmp_path, f"[keys]\nUpper = '{SECRET}'\n"))


@pytest.mark.parametrize("keys", ["{}", f'{{"k2": "{SECRET}"}}'])
def test_an_owner_whose_key_is_not_there_is_refused_at_the_start(monkeypatch, keys):
    monkeypatch.setenv("TIERLOG_KEYS", keys)
    monkeypatch.setenv("TIERLOG_INGEST__OWNER__LEDGER_KEY_ID", "k1")
    with pytest.raises(RefusedError, match="ledger_key_id is k1, and keys has no such key"):
        load_settings()
