"""``python -m deploy.config.chart_schema FILE`` puts the config's schema into the chart's.

So ``helm install`` refuses a wrong field of ``config`` by its name, before anything is installed.
"""

import json
import sys
from pathlib import Path
from typing import Any, cast

from core.config import SluiceConfig

CONFIG = "SluiceConfig"


def with_config(chart_schema: dict[str, Any]) -> dict[str, Any]:
    """Return ``chart_schema`` with today's schema of the config in place of whatever was there."""
    schema = SluiceConfig.model_json_schema()
    kinds: dict[str, Any] = schema.pop("$defs")
    own = {name: kind for name, kind in chart_schema["$defs"].items() if name[0].islower()}
    config = {CONFIG: schema, **kinds}
    return {
        **chart_schema,
        "$defs": own | {name: _bare(config[name]) for name in sorted(config)},
    }


def _bare(schema: object) -> object:
    """Leave out what validates nothing: titles and defaults, which the reference page has."""
    if isinstance(schema, list):
        return [_bare(part) for part in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    parts = cast("dict[str, object]", schema)
    bare = {
        key: _bare(value)
        for key, value in parts.items()
        if key not in {"title", "default", "description", "format", "properties"}
    }
    if "properties" in parts:
        properties = cast("dict[str, object]", parts["properties"])
        bare["properties"] = {name: _bare(part) for name, part in properties.items()}
    return bare


def main() -> int:
    """Rewrite the file."""
    path = Path(sys.argv[1])
    schema = with_config(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
