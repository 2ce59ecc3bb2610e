"""Reads the configuration's sources, merges them, and explains what is wrong with a value and where it is."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.exceptions import SettingsError

from cluster.config.values import mask_password
from cluster.errors import LeadoutError

ENV_PREFIX = "LEADOUT_"
ENV_NESTED_DELIMITER = "__"
CONFIG_FILE_VARIABLE = "LEADOUT_CONFIG"


class ConfigError(LeadoutError, ValueError):
    """A wrong key or value; the message names the key path, the value, its source and what is allowed."""

    exit_status = 2


@dataclass(frozen=True)
class ConfigSource:
    """The values of one source, nested as the tree is."""

    kind: str  # "file" | "environment" | "flag"
    name: str  # the file's path, else ""
    values: Mapping[str, Any]

    def place(self, path: tuple[str, ...]) -> str:
        """Where this source has the value of ``path``, in words."""
        if self.kind == "environment":
            return f"environment variable {env_name(path)}"
        return f"file {self.name}" if self.kind == "file" else "flags"


def env_name(path: Sequence[str]) -> str:
    """The variable of a key path: ``("engine", "block_size")`` → ``LEADOUT_ENGINE__BLOCK_SIZE``."""
    return ENV_PREFIX + ENV_NESTED_DELIMITER.join(path).upper()


def key_paths(tree: type[BaseModel]) -> list[tuple[str, ...]]:
    """The path of every leaf of the tree, in order."""
    paths: list[tuple[str, ...]] = []
    for name, field in tree.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths += [(name, *path) for path in key_paths(field.annotation)]
        else:
            paths.append((name,))
    return paths


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later duplicate key win silently; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def read_yaml(file: Path) -> ConfigSource:
    """The values of a YAML file; an empty file has none. Raises ConfigError."""
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read the configuration file {file}: {reason}") from None
    try:
        values = yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"the configuration file {file} is not valid YAML: {error}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"the configuration file {file} must hold a mapping of sections, not {_type_name(values)}"
        )
    # A section with nothing under it is null in YAML, and means no values.
    values = {key: {} if value is None else value for key, value in values.items()}
    return ConfigSource("file", str(file), _text_keys(values, f"file {file}", ()))


def read_environment(tree: type[BaseSettings]) -> ConfigSource:
    """The values of ``LEADOUT_*``; empty ones count as unset. Raises ConfigError for an unknown name."""
    known = {env_name(path) for path in key_paths(tree)} | {CONFIG_FILE_VARIABLE}
    unknown = sorted(
        name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    )
    if unknown:
        raise ConfigError("\n".join(_unknown_variable(name, known) for name in unknown))
    try:
        values = EnvSettingsSource(tree)()
    except SettingsError as error:
        raise ConfigError(f"cannot read the environment: {error}") from None
    return ConfigSource("environment", "", values)


def _unknown_variable(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name.upper(), known, n=3, cutoff=0.6)
    section = [other for other in sorted(known) if other.startswith(name.upper() + ENV_NESTED_DELIMITER)]
    matches = near or section
    hint = f"did you mean {' or '.join(matches)}?" if matches else "see docs/configuration.md for all names"
    return f"unknown environment variable {name}={os.environ[name]!r}: {hint}"


def read_flags(overrides: Mapping[str, Any]) -> ConfigSource:
    """The values of the command line; a leaf of None means that the flag was not given."""
    return ConfigSource("flag", "", _without_none(_text_keys(overrides, "flags", ())))


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def _text_keys(values: Mapping[Any, Any], place: str, path: tuple[str, ...]) -> dict[str, Any]:
    """``values`` with all keys checked to be text. Raises ConfigError."""
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{'.'.join((*path, repr(key)))} ({place}): keys must be text")
    return {
        key: _text_keys(value, place, (*path, key)) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def merge_sources(sources: Sequence[ConfigSource]) -> dict[str, Any]:
    """One nested dict; a later source wins leaf by leaf."""
    merged: dict[str, Any] = {}
    for source in sources:
        _merge_into(merged, source.values)
    return merged


def _merge_into(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            if not isinstance(target.get(key), dict):
                target[key] = {}
            _merge_into(target[key], value)
        else:
            target[key] = value


def explain(error: ValidationError, tree: type[BaseModel], sources: Sequence[ConfigSource]) -> str:
    """The message of a ConfigError: one line for each thing that is wrong."""
    return "\n".join(_explain_one(dict(detail), tree, sources) for detail in error.errors(include_url=False))


def _explain_one(detail: dict[str, Any], tree: type[BaseModel], sources: Sequence[ConfigSource]) -> str:
    location = tuple(str(part) for part in detail["loc"])
    path = _longest_known(location, tree) if detail["type"] != "extra_forbidden" else location
    place = next(
        (source.place(path) for source in reversed(sources) if _holds(source.values, path)), "default"
    )
    if detail["type"] == "extra_forbidden":
        return _unknown_key(location, detail["input"], tree, place)
    key = ".".join(path)
    own_words = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else None
    if path not in key_paths(tree):
        if own_words:  # several keys of the section disagree
            return f"{key}: {own_words}"
        return f"{key} = {detail['input']!r} ({place}): must be a mapping of keys"
    schema = leaf_schema(tree, path)
    value = _value_at(sources, path, detail["input"])
    if isinstance(value, str) and schema.get("format") == "registry-url":
        value = mask_password(value)
    return f"{key} = {value!r} ({place}): {own_words or 'must be ' + _allowed(schema)}"


def _unknown_key(path: tuple[str, ...], value: Any, tree: type[BaseModel], place: str) -> str:
    section: Any = tree
    for part in path[:-1]:
        section = section.model_fields[part].annotation
    allowed = list(section.model_fields)
    near = difflib.get_close_matches(path[-1], allowed, n=3, cutoff=0.6)
    hint = f" did you mean {' or '.join(near)}?" if near else ""
    return f"{'.'.join(path)} = {value!r} ({place}): unknown key;{hint} allowed: {', '.join(allowed)}"


def _longest_known(location: tuple[str, ...], tree: type[BaseModel]) -> tuple[str, ...]:
    """The part of an error's location that is a key path: list indexes and union branches cut off."""
    for path in key_paths(tree):
        if location[: len(path)] == path:
            return path
    return location[:1]


def _holds(values: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _value_at(sources: Sequence[ConfigSource], path: tuple[str, ...], default: Any) -> Any:
    for source in reversed(sources):
        if _holds(source.values, path):
            value: Any = source.values
            for part in path:
                value = value[part]
            return value
    return default


def leaf_schema(tree: type[BaseModel], path: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of one leaf of the tree."""
    schema = tree.model_json_schema()
    node: dict[str, Any] = schema
    for part in path:
        node = node["properties"][part]
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return node


def allowed_values(tree: type[BaseModel], path: Sequence[str]) -> str:
    """What the leaf at ``path`` takes, in words, from its JSON schema."""
    return _allowed(leaf_schema(tree, path))


def _allowed(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type")
    match kind:
        case _ if schema.get("format") == "byte-size":
            return "a size like 1048576 or 512MiB" + _bounds(schema)
        case _ if schema.get("format") == "registry-url":
            return "a redis://, rediss:// or unix:// URL"
        case "integer" | "number":
            return ("an integer" if kind == "integer" else "a number") + _bounds(schema)
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array":
            least = schema.get("minItems", 0)
            return "a list of text" + (f" with at least {least} entry" if least else "")
        case "string" if "pattern" in schema:
            return "1 to 128 letters, digits, '.', '_' and '-', the first a letter or digit"
        case "string":
            return "text" + (", not empty" if schema.get("minLength") else "")
    raise TypeError(f"no words for the schema {schema!r}")


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is not None:
        return f" above {above:g}" + ("" if high is None else f", at most {high:g}")
    if below is not None:
        return f" from {low:g}, below {below:g}"
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f", at least {low}"
    return f", at most {high}" if high is not None else ""


def _type_name(value: object) -> str:
    return {list: "a list", str: "text", int: "a number", float: "a number", bool: "a boolean"}.get(
        type(value), type(value).__name__
    )
