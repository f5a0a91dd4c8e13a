"""What tiny configurations of some model types need beside the general rules, and why."""

from __future__ import annotations

from typing import Any

CONSTRAINTS: dict[str, dict[str, Any]] = {}
