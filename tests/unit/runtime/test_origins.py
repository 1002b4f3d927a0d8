"""Precedence of settings, where each value came from, profiles, and names that are none."""

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierlog.cli.main import app
from tierlog.cli.session import SESSION, Session
from tierlog.model.errors import RefusedError
from tierlog.runtime.naming import all_names, flags_of, nearest, variable_of, variables_of
from tierlog.runtime.origins import explain_settings, redacted_settings
from tierlog.runtime.profiles import PROFILES, profile_rows
from tierlog.runtime.settings import Settings, load_settings

PASSWORD = "correct-horse-battery"
KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("TIERLOG_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def session():
    before = (SESSION.debug, SESSION.state_dir, SESSION.profile, SESSION.given)
    yield SESSION
    SESSION.debug, SESSION.state_dir, SESSION.profile, SESSION.given = before


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tierlog.toml"
    path.write_text(text)
    return path


def _origin(name, file=None, flags=None):
    settings = load_settings(file, flags=flags)
    found = {one.name: one for one in explain_settings(settings, file)}[name]
    return found.value, found.origin


def test_each_source_gives_way_to_the_one_before_it(tmp_path, monkeypatch):
    """Flag, environment, profile, file, default: one more each time, and the new one wins."""
    name, seen = "kafka.replication_factor", []
    seen.append(_origin(name))
    file = _file(tmp_path, "[kafka]\nreplication_factor = 7\n")
    seen.append(_origin(name, file))
    file = _file(tmp_path, "profile = 'production'\n[kafka]\nreplication_factor = 7\n")
    seen.append(_origin(name, file))
    monkeypatch.setenv("TIERLOG_KAFKA__REPLICATION_FACTOR", "5")
    seen.append(_origin(name, file))
    seen.append(_origin(name, file, flags_of(Settings, [f"{name}=9"])))
    assert seen == [
        (1, "default"),
        (7, f"file: {file}"),
        (3, "profile: production"),
        (5, "environment: TIERLOG_KAFKA__REPLICATION_FACTOR"),
        (9, "argument"),
    ]
    assert all(one != after for one, after in pairwise(seen))


def test_the_profile_is_chosen_by_the_same_precedence(tmp_path, monkeypatch):
    file = _file(tmp_path, "profile = 'production'\n")
    assert load_settings(file).kafka.replication_factor == 3
    monkeypatch.setenv("TIERLOG_PROFILE", "development")
    assert load_settings(file).log.level == "debug"
    settings = load_settings(file, flags={"profile": "embedded"})
    assert (settings.profile, settings.log.level) == ("embedded", "info")
    assert settings.ingest.owner.ensemble_size == 1


def test_a_profile_sets_its_values_and_leaves_the_rest_of_a_section(tmp_path):
    file = _file(tmp_path, "profile = 'production'\n[s3]\nbucket = 'mine'\n")
    settings = load_settings(file)
    assert (settings.s3.bucket, settings.s3.read_back) == ("mine", "sample")


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile_is_taken_by_the_models(name):
    settings = load_settings(flags={"profile": name})
    origins = {one.name: one.origin for one in explain_settings(settings, None)}
    for row in profile_rows():
        if row["profile"] == name:
            value = settings
            for part in row["setting"].split("."):
                value = getattr(value, part)
            assert value == row["value"], row
            assert origins[row["setting"]] == f"profile: {name}"


def test_the_profiles_are_those_of_the_model():
    annotation = str(Settings.model_fields["profile"].annotation)
    assert all(f"'{name}'" in annotation for name in PROFILES)
    assert annotation.count("'") == 2 * len(PROFILES)


def test_a_profile_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("TIERLOG_PROFILE", "prodution")
    with pytest.raises(RefusedError, match="'production'") as caught:
        load_settings()
    assert "TIERLOG_PROFILE" in caught.value.remedy


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("TIERLOG_S3__BUKCET", "TIERLOG_S3__BUCKET"),
        ("TIERLOG_INGEST__STORAGE__JOURNAL_SEGMENT_BYTE", "JOURNAL_SEGMENT_BYTES"),
        ("TIERLOG_OFLOADER__PARTS_IN_FLIGHT_MAX", "TIERLOG_OFFLOADER__PARTS_IN_FLIGHT_MAX"),
        ("TIERLOG_S3_BUCKET", "TIERLOG_S3__BUCKET"),
        ("TIERLOG_PROFIL", "TIERLOG_PROFILE"),
        ("TIERLOG_CONFIGS", ""),
        ("TIERLOG_STATEDIR", "TIERLOG_STATE_DIR"),
    ],
)
def test_a_variable_that_sets_nothing_is_refused_with_the_nearest_one(monkeypatch, variable, meant):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(RefusedError, match="sets nothing") as caught:
        load_settings()
    assert meant in caught.value.remedy
    assert variable in str(caught.value) + caught.value.remedy


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[s3]\nbukcet = 'x'", "s3.bucket"),
        ("[ingest.storage]\ngc_intervall_s = 1", "ingest.storage.gc_interval_s"),
        ("[schedular]\ninterval_s = 1", "scheduler"),
        ("profil = 'production'", "profile"),
    ],
)
def test_a_name_in_the_file_that_sets_nothing_is_refused_with_the_nearest(tmp_path, text, meant):
    with pytest.raises(RefusedError, match="sets nothing") as caught:
        load_settings(_file(tmp_path, text))
    assert meant in caught.value.remedy


def test_variables_of_other_programs_are_left_alone(monkeypatch):
    for name in ("TIERLOG_OF_SOMEBODY_ELSE", "TIERLOG_FAULTS_SHARE", "TIERLOG_TAG"):
        monkeypatch.setenv(name, "1")
    load_settings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3.bukcet=x", "s3.bucket"),
        ("bucket=x", "bucket"),
        ("s3=x=y=z", ""),
        ("s3.bucket", "--set"),
        ("=x", "--set"),
        ("s3..bucket=x", "--set"),
    ],
)
def test_an_argument_that_sets_nothing_is_refused(text, says):
    with pytest.raises(RefusedError) as caught:
        load_settings(flags=flags_of(Settings, [text]))
    assert says in caught.value.remedy + str(caught.value)


def test_arguments_have_lists_keys_and_equals_signs():
    given = ['ingest.ledger_directories=["a", "b"]', "s3.key_prefix=a=b", f"keys.k1={KEY}"]
    flags = flags_of(Settings, given)
    settings = load_settings(flags=flags)
    assert settings.ingest.ledger_directories == (Path("a"), Path("b"))
    assert settings.s3.key_prefix == "a=b"
    assert list(settings.keys) == ["k1"]
    assert settings.flags == flags


def test_arguments_become_the_variables_that_mean_the_same(monkeypatch):
    given = ['ingest.ledger_directories=["a", "b"]', "s3.key_prefix=a=b", f"keys.k1={KEY}"]
    for name, value in variables_of(flags_of(Settings, given)).items():
        monkeypatch.setenv(name, value)
    by_variables = load_settings()
    by_arguments = load_settings(flags=flags_of(Settings, given))
    assert by_variables.model_dump() == by_arguments.model_dump()


def test_a_section_as_json_is_the_origin_of_what_it_has(monkeypatch):
    monkeypatch.setenv("TIERLOG_S3", '{"bucket": "from-json"}')
    monkeypatch.setenv("TIERLOG_S3__REGION", "eu-1")
    assert _origin("s3.bucket") == ("from-json", "environment: TIERLOG_S3")
    assert _origin("s3.region") == ("eu-1", "environment: TIERLOG_S3__REGION")
    assert _origin("s3.driver") == ("aws-s3", "default")


def test_every_setting_is_shown_once_and_no_secret_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERLOG_S3__SECRET_KEY", PASSWORD)
    monkeypatch.setenv("TIERLOG_KEYS__K1", KEY)
    monkeypatch.setenv("TIERLOG_REDIS__URL", f"redis://user:{PASSWORD}@cache:6379/0")
    file = _file(tmp_path, f"[wire]\ntoken = '{PASSWORD}'\n")
    rows = redacted_settings(load_settings(file), file)
    names = [row["setting"] for row in rows]
    assert len(names) == len(set(names))
    expected = {".".join(path) for path in all_names(Settings)} - {"keys"} | {"keys.k1"}
    assert set(names) == expected
    text = json.dumps(rows)
    assert PASSWORD not in text
    assert KEY not in text
    shown = {row["setting"]: row for row in rows}
    assert shown["redis.url"]["value"] == "redis://cache:6379/0"
    assert shown["wire.token"] == {
        "setting": "wire.token",
        "value": "***",
        "origin": f"file: {file}",
        "variable": "TIERLOG_WIRE__TOKEN",
    }


def test_every_name_has_a_variable_that_sets_it():
    for path in all_names(Settings):
        assert variable_of(path).startswith("TIERLOG_")
    assert nearest("bukcet", ["bucket", "region"]) == "bucket"
    assert nearest("zzz", ["bucket", "region"]) is None


class TestCommand:
    @pytest.fixture(autouse=True)
    def _own_session(self, session: Session):
        return session

    def _run(self, *arguments):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def test_show_says_where_values_came_from(self, monkeypatch):
        monkeypatch.setenv("TIERLOG_S3__REGION", "eu-1")
        rows = self._run(
            "--profile", "production", "--set", "s3.bucket=mine", "config", "show", "s3",
            "--origin", "--changed", "-o", "json",
        )  # fmt: skip
        assert {row["setting"]: (row["value"], row["origin"]) for row in rows} == {
            "s3.bucket": ("mine", "argument"),
            "s3.region": ("eu-1", "environment: TIERLOG_S3__REGION"),
            "s3.read_back": ("sample", "profile: production"),
        }

    def test_show_refuses_a_section_that_is_none(self):
        done = CliRunner().invoke(app, ["config", "show", "s33"])
        assert done.exit_code == 2
        assert "Did you mean s3?" in done.stderr

    def test_profiles_are_listed(self):
        rows = self._run("config", "profiles", "-o", "json")
        assert {row["profile"] for row in rows} == set(PROFILES)
