"""One tree of settings: precedence, names, bounds, and secrets that never print."""

from pathlib import Path

import pytest

from tierlog.model.errors import RefusedError
from tierlog.runtime.settings import S3Settings, Settings, load_settings


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIERLOG_S3__BUKCET", "x"),
        ("TIERLOG_S3__CONNECTIONS_MAX", "0"),
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


def test_secrets_do_not_print(monkeypatch):
    monkeypatch.setenv("TIERLOG_S3__SECRET_KEY", "hush-hush")
    monkeypatch.setenv("TIERLOG_WIRE__TOKEN", "hush-hush")
    settings = load_settings()
    assert settings.s3.secret_key is not None
    assert settings.s3.secret_key.get_secret_value() == "hush-hush"
    assert "hush-hush" not in repr(settings) + str(settings) + settings.model_dump_json()
