"""Names of settings: which there are, and the nearest one to a name that is none of them.

A setting has a dotted name (``s3.bucket``) and a variable (``TIERLOG_S3__BUCKET``). Owns how one
follows from the other, and refuses what would set nothing. Does not own the models.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from tierlog.model.errors import RefusedError

PREFIX: Final = "TIERLOG_"
BETWEEN: Final = "__"
CONFIG: Final = f"{PREFIX}CONFIG"
"""The variable that names the settings file."""
ALIKE: Final = 0.6
MISSPELT: Final = 0.84
"""A variable without a section is ours when it is so much like one of ours: other programs have
variables with this prefix, too."""


def variable_of(path: Sequence[str]) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + BETWEEN.join(path).upper()


def section_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """Return the model of a section; None where there is none."""
    for name in path:
        info = model.model_fields.get(name)
        if info is None or not _is_section(info.annotation):
            return None
        model = info.annotation  # type: ignore[assignment]  # _is_section says what it is
    return model


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def nearest(name: str, known: Iterable[str], *, alike: float = ALIKE) -> str | None:
    """Return the known name that is most like ``name``; None when none is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=alike)
    return found[0] if found else None


def all_names(model: type[BaseModel], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all settings, those in sections below too."""
    found: list[tuple[str, ...]] = []
    for name, info in model.model_fields.items():
        here = (*path, name)
        if _is_section(info.annotation):
            found += all_names(info.annotation, here)  # type: ignore[arg-type]
        else:
            found.append(here)
    return found


def unknown_setting(model: type[BaseModel], path: Sequence[str]) -> RefusedError:
    """Return the refusal of a name that sets nothing, with the nearest one that does."""
    name = ".".join(path)
    meant = nearest(name, [".".join(one) for one in all_names(model)])
    near = meant.split(".") if meant is not None else []
    means = f"Write {variable_of(near)}, or {'.'.join(near)} in the file" if near else ""
    return RefusedError(
        f"setting {name} sets nothing: there is no such setting",
        remedy=f"{means or 'See tierlog config show'}; {variable_of(path)} is unknown",
    )


def check_names(
    model: type[BaseModel],
    *,
    tables: Mapping[str, Any],
    file: object,
    environ: Iterable[str],
) -> None:
    """Refuse a section that does not exist: it would be passed over in silence.

    Names inside of sections are refused by the models. ``tables`` are what ``file`` has.
    """
    known = model.model_fields
    for name, value in tables.items():
        if name not in known:
            what = f"[{name}]" if isinstance(value, Mapping) else name
            raise _stray(f"{what} in {file}", nearest(name, known), known)
    for variable in sorted(environ):
        name = variable.upper().removeprefix(PREFIX).lower()
        if variable.upper().startswith(PREFIX) and _sets_nothing(model, name):
            meant = nearest(variable.upper(), [variable_of(one) for one in all_names(model)])
            raise _stray(variable, meant, known)


def _sets_nothing(model: type[BaseModel], name: str) -> bool:
    """Tell whether a variable is meant for us and is no setting of ours."""
    known = model.model_fields
    section, found, _ = name.partition(BETWEEN)
    if found:
        return section not in known
    if name in known or variable_of([name]) == CONFIG:
        return False
    # With one underscore it is ours if a section's name is before it, or if it is nearly ours.
    plain = [one for one, info in known.items() if not _is_section(info.annotation)]
    return name.partition("_")[0] in known or bool(
        nearest(name, [*plain, "config"], alike=MISSPELT)
    )


def _stray(what: str, meant: str | None, known: Iterable[str]) -> RefusedError:
    asked = f"Did you mean {meant}? " if meant else ""
    return RefusedError(
        f"{what} sets nothing: there is no such section",
        remedy=f"{asked}Write TIERLOG_SECTION__NAME, or [section]; there are {', '.join(known)}",
    )


def flags_of(model: type[BaseModel], texts: Iterable[str]) -> dict[str, Any]:
    """Return a tree of values from arguments such as ``s3.bucket=logs``."""
    tree: dict[str, Any] = {}
    for text in texts:
        name, found, value = text.partition("=")
        path = name.strip().split(".")
        if not found or not all(path):
            raise RefusedError(
                f"the argument {name[:80]!r} sets nothing",
                remedy="Write --set NAME=VALUE, as --set s3.bucket=logs",
            )
        section = section_at(model, path[:-1])
        is_id = section is None and path[:-1] == ["keys"]
        if not is_id and (section is None or path[-1] not in section.model_fields):
            raise unknown_setting(model, path)
        below = tree
        for one in path[:-1]:
            below = below.setdefault(one, {})
        below[path[-1]] = _value_of(value)
    return tree


def _value_of(text: str) -> object:
    """Return lists and tables as JSON has them; all else is text, which the models read."""
    if text[:1] not in "[{" or not text:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def variables_of(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, str]:
    """Return a tree of values as the variables that set them, for processes that are started."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= variables_of(value, (*path, name))
        else:
            text = json.dumps(value) if isinstance(value, list) else str(value)
            found[variable_of((*path, name))] = text
    return found
