"""Validates values against the published schemas in `schemas`, as strictly as a server that refuses unknown keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).parent / "schemas"


def validate(values: Any, name: str) -> None:
    """Raises jsonschema.ValidationError if the values do not fit the schema."""
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    if name in ("trainjob", "trainingruntime", "jobset"):
        schema = _strict(schema)
        schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft202012Validator(schema).validate(values)


def _strict(schema: Any) -> Any:
    """An OpenAPI schema of Kubernetes as a JSON schema: unknown keys are refused, quantities are text or a number."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if "properties" in found and isinstance(found.get("type"), str) and "additionalProperties" not in found:
        found["additionalProperties"] = bool(found.get("x-kubernetes-preserve-unknown-fields"))
    return found
