"""Where each setting's value came from: argument, environment, profile, file or default.

Invariant: the value that is shown is the one that the process works with; secrets are masked.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from pydantic_settings import EnvSettingsSource

from tierlog.runtime.naming import BETWEEN, variable_of
from tierlog.runtime.profiles import profile_values
from tierlog.runtime.redaction import MASK, Redactor, secrets_of
from tierlog.runtime.settings import Settings, file_tables

DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as it is."""

    path: tuple[str, ...]
    value: object
    origin: str

    @property
    def name(self) -> str:
        """Its name, as arguments have it."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return variable_of(self.path)


def explain_settings(settings: Settings, config_file: Path | None) -> list[Setting]:
    """Return all settings with where each came from; ``settings`` were loaded with that file."""
    environment = EnvSettingsSource(Settings)()
    profile = profile_values(settings.profile)
    tables = file_tables(config_file)
    redactor = Redactor(secrets_of(settings))
    found = []
    for path, value in _leaves(settings):
        if _has(settings.flags, path):
            origin = "argument"
        elif _has(environment, path):
            origin = f"environment: {_variable_that_set(path)}"
        elif _has(profile, path):
            origin = f"profile: {settings.profile}"
        elif _has(tables, path):
            origin = f"file: {config_file}"
        else:
            origin = DEFAULT
        found.append(Setting(path=path, value=_shown(value, redactor), origin=origin))
    return found


def redacted_settings(settings: Settings, config_file: Path | None) -> list[dict[str, Any]]:
    """Return all settings as rows that may be shown to anybody."""
    return [
        {"setting": one.name, "value": one.value, "origin": one.origin, "variable": one.variable}
        for one in explain_settings(settings, config_file)
    ]


def _leaves(
    model: BaseModel, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    for name in type(model).model_fields:
        value, here = getattr(model, name), (*path, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, here)
        elif isinstance(value, Mapping) and value:
            yield from (((*here, str(key)), one) for key, one in value.items())
        else:
            yield here, value


def _has(tree: object, path: Sequence[str]) -> bool:
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


def _variable_that_set(path: Sequence[str]) -> str:
    """Return the variable of a setting, or that of the section that was given as JSON."""
    names = {name.upper() for name in os.environ}
    for length in range(len(path), 0, -1):
        variable = variable_of(path[:length])
        if variable in names:
            return variable
    return variable_of(path).partition(BETWEEN)[0]


def _shown(value: object, redactor: Redactor) -> object:
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, Mapping) and not value:
        return None
    if isinstance(value, Path):
        return redactor.text(str(value))
    return redactor.value(value)
