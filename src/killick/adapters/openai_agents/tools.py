"""SDK tools through the gate: each call is a step, by the model's call id."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from agents.tool import maybe_invoke_function_tool_failure_error_function, set_function_tool_failure_error_function
from agents.tool_context import ToolContext

from agents import CustomTool, FunctionTool, ModelBehaviorError, Tool
from killick.adapters.openai_agents.turns import Turn, turn_here
from killick.adapters.tool_gate import Errors, ToolFailed, declared, hinted, is_answer
from killick.contracts.facts import Approval
from killick.definitions.tools import AnyTool, resolved_hints
from killick.definitions.tools import Tool as KillickTool
from killick.engine.steps.intention import ERROR, is_error
from killick.errors import DeclarationRefused, Rejected, StepFailed, ValueRefused
from killick.model.codec import plain

Said: TypeAlias = AnyTool | Mapping[str, Any] | str | None
"""A tool's options, as in `ToolOptions`; None leaves it unrecorded."""

_LOCAL: Final = ("executor", "editor", "computer")
"""The attributes of local tools that are not functions."""

_MISFIT: Final = "Invalid JSON input for tool"


class _Misfit(Exception):
    """Arguments that the tool refused: its function was not called."""


class Gate:
    """Wraps the tools of every agent that a runner runs."""

    def __init__(self, tools: Mapping[str, Said], to: str | tuple[str, ...], errors: Errors) -> None:
        self._said = dict(tools)
        self._approval = Approval(to)
        self._errors: Errors = errors

    def of(self, tool: Tool) -> Tool:
        """Returns the same tool, through the gate. A provider-hosted tool is part of the model's reply."""
        name = getattr(tool, "qualified_name", None) or tool.name
        if self._said.get(name, ...) is None:
            return tool
        if isinstance(tool, FunctionTool):
            if tool._is_agent_tool and name not in self._said:  # pyright: ignore[reportPrivateUsage]
                return self._delegating(tool, name)
            return self._gated(tool, self._declared(tool, name))
        if isinstance(tool, CustomTool):
            return self._gated(tool, self._declared(tool, name))
        if any(getattr(tool, field, None) is not None for field in _LOCAL):
            advice = "make it a function tool, or leave it out of the record with"
            raise DeclarationRefused(name, f"runs here without being recorded; {advice} tools={{{name!r}: None}}")
        return tool

    def _declared(self, tool: FunctionTool | CustomTool, name: str) -> AnyTool:
        """Returns its Killick declaration: from the given options, or its server's hints."""
        said = self._said.get(name, hinted(getattr(tool, "mcp_annotations", None)))
        known: dict[str, Any] = {"doc": tool.description}
        if isinstance(tool, FunctionTool):
            known |= {"schema": tool.params_json_schema, "timeout": tool.timeout_seconds}
        made = declared(name, said or {}, **known)
        if made is not said and (own := getattr(tool, "__wrapped__", None)) is not None:
            # A recorded result is converted to the function's declared return type.
            made.shape.returns = resolved_hints(own).get("return", Any)
        return made

    def _gated(self, tool: FunctionTool | CustomTool, declared: AnyTool) -> Tool:
        gated = copy.copy(tool)
        gated.needs_approval = False
        gated.on_invoke_tool = _Calls(tool, declared, self._approval, self._errors)
        if isinstance(gated, FunctionTool):
            gated.timeout_seconds = None
        return gated

    def _delegating(self, tool: FunctionTool, name: str) -> Tool:
        """Wraps an agent used as a tool: no step of its own, because its models and tools have theirs."""
        inner = tool._agent_instance  # pyright: ignore[reportPrivateUsage]
        if not hasattr(inner, "_killick_gate"):
            advice = f"make it of runner.agent(…): runner.agent({getattr(inner, 'name', 'agent')}).as_tool(…)"
            raise DeclarationRefused(name, f"runs an agent whose tools are not recorded; {advice}")
        gated, own = copy.copy(tool), tool.on_invoke_tool

        async def delegate(ctx: ToolContext[Any], input: str) -> Any:  # noqa: A002
            outer = turn_here(name)
            turn = Turn(outer.host, outer.call_key(ctx.tool_call_id))
            async with outer.calling():
                with turn.entered():
                    said = await own(ctx, input)
                if turn.waiting is not None:  # the SDK made words for the model of it
                    raise turn.waiting
                return said

        gated.on_invoke_tool = delegate
        return gated


class _Calls:
    """Called by the SDK in place of a tool's function."""

    def __init__(self, tool: FunctionTool | CustomTool, declared: AnyTool, approval: Approval, errors: Errors) -> None:
        self._tool = tool
        self._declared = declared
        self._approval = approval
        self._errors: Errors = errors
        # The gate must see the errors that the SDK would turn into text for the model.
        self._raising: Any = tool
        if isinstance(tool, FunctionTool):
            self._raising = set_function_tool_failure_error_function(copy.copy(tool), None)

    async def __call__(self, ctx: ToolContext[Any], input: str) -> Any:  # noqa: A002
        turn = turn_here(self._tool.name)
        arguments, key = self._read(input), turn.call_key(ctx.tool_call_id)
        declared = self._declared
        if declared.policy.approve is None and await self._needs_approval(ctx, arguments, input):
            declared = declared.options(approve=self._approval)

        async def invoke(**given: Any) -> Any:
            if given != arguments:
                ctx.tool_arguments = self._written(given)
            # Its model calls are not the turn's own: they are skipped if its outcome is recorded.
            inside = Turn(turn.host, f"{key}/inside")
            try:
                with inside.entered():
                    output = await self._raising.on_invoke_tool(
                        ctx, input if given == arguments else ctx.tool_arguments
                    )
            except ModelBehaviorError as error:
                if str(error).startswith(_MISFIT):
                    raise _Misfit from error
                raise
            except Exception as error:
                if self._errors == "ask" or inside.waiting is not None or not is_answer(error, declared):
                    raise
                return {ERROR: await self._said(ctx, error)}
            return _storable(output)

        own = None if _is_whole(declared) else invoke
        try:
            async with turn.calling():
                found = await turn.host.call(declared, arguments, key=key, fn=own, bubbles=(_Misfit,))
                return found[ERROR] if is_error(found) else found
        except Rejected as no:
            return str(no)
        except _Misfit as misfit:
            return await self._said(ctx, misfit.__cause__ or misfit)
        except StepFailed as failed:
            return await self._said(ctx, ToolFailed(str(failed.failure)))

    def _read(self, input: str) -> dict[str, Any]:  # noqa: A002
        """Returns the arguments by name; other text is one argument."""
        if isinstance(self._tool, FunctionTool):
            try:
                read = json.loads(input) if input.strip() else {}
            except ValueError:
                read = None
            if isinstance(read, dict):
                return read
        return {"input": input}

    def _written(self, arguments: Mapping[str, Any]) -> str:
        return str(arguments["input"]) if isinstance(self._tool, CustomTool) else json.dumps(arguments)

    async def _needs_approval(self, ctx: ToolContext[Any], arguments: dict[str, Any], input: str) -> bool:  # noqa: A002
        needs: Any = self._tool.needs_approval
        if not callable(needs):
            return bool(needs)
        given = copy.deepcopy(arguments) if isinstance(self._tool, FunctionTool) else input
        said = needs(ctx, given, ctx.tool_call_id)
        return bool(await said if inspect.isawaitable(said) else said)

    async def _said(self, ctx: ToolContext[Any], error: BaseException) -> Any:
        """Returns the model's text for an error, by the tool's own rules; without rules, raises it."""
        if not isinstance(self._tool, FunctionTool):
            raise error
        message = await maybe_invoke_function_tool_failure_error_function(
            function_tool=self._tool, context=ctx, error=error
        )
        if message is None:
            raise error
        return message


def _is_whole(declared: AnyTool) -> bool:
    """Returns whether a user declared a tool with its own function."""
    return isinstance(declared, KillickTool) and not hasattr(declared.shape, "schema")


def _storable(output: Any) -> Any:
    """Returns the value to record: the output, or the model's view of it."""
    try:
        plain(output)
    except ValueRefused:
        return str(output)
    return output
