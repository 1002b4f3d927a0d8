"""What a service's HTTP API says of itself: OpenAPI 3.1, with errors as they really are.

The framework tells of a validation error that no service answers with; every refusal is
problem+json with a reason of the closed list, and that is what stands here instead.
"""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tierlog.model.errors import Reason
from tierlog.runtime.errors import PROBLEM_TYPE, Problem

OPENAPI_VERSION: Final = "3.1.0"
API_VERSION: Final = "1"

_NOT_OURS: Final = ("HTTPValidationError", "ValidationError")
_PROBLEM: Final = {
    "description": "What was refused or failed, and the remedy.",
    "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def describe_api(app: FastAPI) -> None:
    """Let ``app`` tell of its errors as they are, at /openapi.json and /docs."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(
                title=app.title,
                version=API_VERSION,
                openapi_version=OPENAPI_VERSION,
                routes=app.routes,
            )
            app.openapi_schema = _with_problems(found)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    for path in document.get("paths", {}).values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _PROBLEM
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in _NOT_OURS:
        schemas.pop(name, None)
    problem = Problem.model_json_schema()
    problem["properties"]["reason"]["enum"] = [reason.value for reason in Reason]
    schemas["Problem"] = problem
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    return document
