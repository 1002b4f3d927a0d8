"""The specification under docs/spec: its models, and the mistakes that must be found.

A model is a ``.cfg`` whose name begins with its module's: ``Ledger-pair.cfg``. A mistake is one
line of that module, changed inside one definition: ``mistakes.toml`` says which, in which model
its counterexample lies, and which property breaks there.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.spec.tlc import Tlc, Verdict

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "spec"
MODELS = sorted(path.stem for path in FOLDER.glob("*.cfg"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One line done wrong."""

    name: str
    within: str
    line: str
    instead: str
    model: str
    breaks: str
    says: str

    def made_in(self, source: str) -> str:
        """Return the specification with the mistake in it."""
        begin, end = _definition(source, self.within)
        body = source[begin:end]
        if body.count(self.line) != 1:
            raise ValueError(f"{self.name}: {self.within} has not one line with {self.line!r}")
        return source[:begin] + body.replace(self.line, self.instead) + source[end:]

    @property
    def breaks_nothing(self) -> bool:
        """Tell if it is here to show that it breaks nothing."""
        return self.breaks == "nothing"

    def is_caught(self, verdict: Verdict) -> bool:
        """Tell if TLC found what the mistake breaks."""
        return (verdict.broken or "nothing") in self.breaks.split("|")


def _definition(source: str, name: str) -> tuple[int, int]:
    """Return where a definition begins and ends: at the first empty line."""
    starts = [at for at in (_find(source, f"\n{name} =="), _find(source, f"\n{name}(")) if at >= 0]
    if len(starts) != 1:
        raise ValueError(f"there is not one definition {name}")
    return starts[0], source.index("\n\n", starts[0])


def _find(source: str, text: str) -> int:
    at = source.find(text)
    return at if at < 0 else at + 1


def config(model: str) -> str:
    """Return a model's configuration."""
    return (FOLDER / f"{model}.cfg").read_text(encoding="utf-8")


def mistakes() -> list[Mistake]:
    """Return all mistakes of ``mistakes.toml``."""
    with (FOLDER / "mistakes.toml").open("rb") as file:
        return [Mistake(**one) for one in tomllib.load(file)["mistake"]]


def module_of(model: str) -> str:
    """Return the module that a model configures."""
    return model.partition("-")[0]


def source(model: str) -> str:
    """Return the specification that a model configures."""
    return (FOLDER / f"{module_of(model)}.tla").read_text(encoding="utf-8")


def check_model(tlc: Tlc, model: str) -> Verdict:
    """Look through a model's whole state space."""
    lasting = "-big-" in model
    return tlc.check(module_of(model), source(model), config(model), lasting=lasting)


def check_mistake(tlc: Tlc, mistake: Mistake) -> Verdict:
    """Look for a mistake's counterexample."""
    wrong = mistake.made_in(source(mistake.model))
    return tlc.check(module_of(mistake.model), wrong, config(mistake.model))
