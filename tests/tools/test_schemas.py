"""Every command has `--json`, and a schema that says what it prints. A new one cannot be forgotten."""

import json
from importlib.resources import files

import jsonschema
import pytest

from hicache.tools.cli import COMMANDS
from tests.tools.parsers import options_of

SCHEMAS = files("hicache.tools") / "schemas"


def test_there_is_a_schema_for_every_command_and_no_other() -> None:
    assert {file.name for file in SCHEMAS.iterdir()} == {f"{name}.json" for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_json_and_its_schema_names_format_and_version(name: str) -> None:
    assert "--json" in options_of(name)
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert f"hicache {name} " in schema["title"]
    for form in schema.get("oneOf", [schema]):
        assert form["properties"]["format"] == {"const": f"hicache-{name}"}
        assert form["properties"]["version"].keys() == {"const"}
        assert {"format", "version"} <= set(form["required"])
        assert form["additionalProperties"] is False
