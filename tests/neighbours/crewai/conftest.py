"""Nothing is sent anywhere, nor written outside of a folder that goes away."""

from __future__ import annotations

import os
import tempfile
import warnings

import pytest

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}
_DATA = tempfile.TemporaryDirectory(prefix="killick-crewai-")
os.environ["XDG_DATA_HOME"] = _DATA.name

# What is imported with CrewAI warns of itself, which is not ours to mend.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from crewai.flow.flow import Flow

# What a flow remembers by meaning is beside the point here, and its database takes long to import.
Flow._skip_auto_memory = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """CrewAI uses what it has declared deprecated itself."""
    for item in items:
        if "crewai" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
