"""Tests that are coroutines run on a loop of their own."""

from __future__ import annotations

import asyncio
import inspect
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # old versions use what they deprecate
    import google.adk.runners  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True
