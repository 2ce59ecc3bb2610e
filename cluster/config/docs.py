"""The configuration reference, written from the configuration's types."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from cluster.config.settings import LeadoutConfig
from cluster.config.sources import CONFIG_FILE_VARIABLE, allowed_values, env_name
from cluster.config.values import format_size

_INTRODUCTION = f"""\
# Configuration

Written by `python -m leadout.docs` from the types in `cluster/config/settings.py`; a test keeps it current.

Every setting has one place in the tree `section.field` and can come from four sources, each winning over the
one before: the default, a YAML file (`--config FILE` or `{CONFIG_FILE_VARIABLE}`), an environment variable
(`LEADOUT_SECTION__FIELD`), and the command line (a flag of its own, or `--set section.field=value`). An
unknown key or a wrong value stops the process with a message that names the key, the value, where it came
from, and what is allowed. An environment variable set to the empty string counts as not set, `null` as no
value.

```yaml
model:
  source: smollm2-135m-instruct
engine:
  kv_cache_memory: 2GiB
router:
  port: 8000
```
"""


def configuration_markdown() -> str:
    """``docs/configuration.md``."""
    parts = [_INTRODUCTION]
    for section_name, section in LeadoutConfig.model_fields.items():
        tree = section.annotation
        assert isinstance(tree, type)
        assert issubclass(tree, BaseModel)
        parts.append(f"## `{section_name}`\n\n{(tree.__doc__ or '').strip()}\n")
        parts.append("| setting | default | allowed | meaning |\n|---|---|---|---|")
        for name, field in tree.model_fields.items():
            path = (section_name, name)
            allowed = allowed_values(LeadoutConfig, path)
            parts.append(
                f"| `{section_name}.{name}`<br>`{env_name(path)}` | {_default(field.default, allowed)} "
                f"| {_cell(allowed)} | {_cell(field.description or '')} |"
            )
        parts.append("")
    return "\n".join(parts)


def _default(value: Any, allowed: str) -> str:
    if value is None or value is PydanticUndefined or value == []:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`{','.join(value)}`"
    if isinstance(value, int) and "MiB" in allowed:
        return f"`{format_size(value)}`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
