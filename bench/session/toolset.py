"""The tools of the coding agent as a model is told of them: eighteen schemas of about 63 KB together.

Seven are used. The rest are operations of this project's own HTTP API with the types that they take and give, as
generators of tools from OpenAPI documents describe them: real schemas of real length, and no session needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from killick.web.app import ROUTES
from killick.web.openapi import openapi

_PATH: Final = {
    "type": "string",
    "description": "A path inside the repository, relative to its root, with forward slashes. Paths that leave the "
    "repository are refused.",
}
_LINE: Final = {"type": "integer", "minimum": 1}

_OWN: Final[tuple[tuple[str, str, dict[str, Any], list[str]], ...]] = (
    (
        "read_file",
        "Reads a text file from the repository and gives its lines with their numbers, as `cat -n` would. By default "
        "the whole file is given; for long files give `start` and `end` and read the part that matters. Line numbers "
        "count from 1 and both ends are included. Lines are given exactly as they stand in the file after the tab, so "
        "that they can be used in `edit_file`; never put the number or the tab into an edit. Reading a file that does "
        "not exist is an error that says so. You should read a file before you change it, and read it again when "
        "something else may have changed it. It is fine to read several files one after the other when a search "
        "named them. Pictures and other binary files cannot be read with this tool.",
        {"path": _PATH, "start": {**_LINE, "description": "The first line to give. Leave it out to start at the top."},
         "end": {**_LINE, "description": "The last line to give. Leave it out to read to the end of the file."}},
        ["path"],
    ),
    (
        "search",
        "Searches the text of all files of the repository with an extended regular expression and gives one line for "
        "each match: the path, the number of the line and the line itself. Always use this tool to find where "
        "something is defined or used; do not guess paths. Characters with a meaning in regular expressions have to "
        "be escaped to be found as they are. At most fifty matches are shown, with the number of those left out: "
        "when there are more, search for something narrower or give a folder in `path`. Matches are sorted by path. "
        "Only source and documentation are searched; generated files and the history of the repository are not.",
        {"pattern": {"type": "string", "minLength": 1, "description": "The extended regular expression."},
         "path": {**_PATH, "description": "A file or folder to search in. Leave it out to search everywhere."}},
        ["pattern"],
    ),
    (
        "list_dir",
        "Lists what a folder of the repository holds, one entry a line, sorted by name. Folders end with a slash, "
        "files are followed by their size in bytes. The listing does not go into the folders below: list them "
        "themselves, or search. Caches and the folder of version control are left out.",
        {"path": {**_PATH, "description": "The folder to list; `.` is the root of the repository."}},
        ["path"],
    ),
    (
        "edit_file",
        "Replaces a text in a file by another one and shows the place afterwards. `old` must stand in the file exactly "
        "once, with its indentation and line ends: take in enough of the lines around it to make it unique. You must "
        "have read the place before, and what you replace must be what you read. To insert, repeat the line before or "
        "after which the new lines belong. To delete, leave them out of `new`. Keep changes as small as they can be, "
        "one place at a time; several places take several calls. The file is written at once. Nothing else is changed: "
        "no formatter runs. When `old` is not found or found more than once, nothing is written and the error says "
        "how often it stands there.",
        {"path": _PATH,
         "old": {"type": "string", "minLength": 1, "description": "The text to replace, exactly as it stands there."},
         "new": {"type": "string", "description": "The text that takes its place."}},
        ["path", "old", "new"],
    ),
    (
        "run_tests",
        "Tries a module of the repository: imports it in a fresh interpreter and runs every test in its documentation, "
        "with a line for each thing that could have one. Gives all that was printed, with tracebacks where something "
        "failed. Run it after every change that could break something and before you say that you are done. When it "
        "fails, read the traceback to its end, look at the place that it names, mend it and run the tool again.",
        {"path": {**_PATH, "description": "The Python file whose part is tried."}},
        ["path"],
    ),
    (
        "git_diff",
        "Shows what has been changed in the working tree since the last commit, as a unified diff. Use it before you "
        "say that a task is done, to see that nothing was changed which should not have been.",
        {"path": {**_PATH, "description": "A file or folder to look at. Leave it out to see everything."}},
        [],
    ),
    (
        "git_log",
        "Shows the last five commits with the files that they changed. Use it to learn how something came about.",
        {"path": {**_PATH, "description": "A file or folder to look at. Leave it out to see everything."}},
        [],
    ),
)  # fmt: skip

_OPERATIONS: Final = (
    "find", "runs", "inbox", "steps", "trace", "why", "fork", "difference", "publish", "health", "answer",
)  # fmt: skip


def tools() -> list[dict[str, Any]]:
    """All eighteen, in OpenAI's shape."""
    own = [
        _tool(name, told, {"type": "object", "properties": properties, "required": required})
        for name, told, properties, required in _OWN
    ]
    return [*own, *_of_the_api()]


def _tool(name: str, told: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": told, "parameters": parameters}}


def _of_the_api() -> Iterator[dict[str, Any]]:
    document = openapi(ROUTES)
    schemas: dict[str, Any] = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            name = operation["operationId"]
            if name not in _OPERATIONS:
                continue
            properties: dict[str, Any] = {}
            for parameter in operation.get("parameters", ()):
                if "name" in parameter:
                    told = parameter.get("description", "")
                    properties[parameter["name"]] = {**parameter["schema"], "description": told}
            taken = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if taken is not None:
                properties["body"] = taken
            given = operation["responses"]
            told = f"{operation.get('summary', '')}\n\n{operation.get('description', '')}\n\nResponses: "
            told += json.dumps({"responses": given, "schemas": _reached(given, schemas)}, ensure_ascii=False)
            parameters = {"type": "object", "properties": properties, "$defs": _reached(taken, schemas)}
            yield _tool(f"killick_{name}", told.strip(), parameters)


def _reached(part: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The named types that a part of the document refers to, and those that they refer to."""
    found: dict[str, Any] = {}
    parts = [part]
    while parts:
        one = parts.pop()
        if isinstance(one, list):
            parts += one
        elif isinstance(one, dict):
            name = str(one.get("$ref", "")).removeprefix("#/components/schemas/")
            if name in schemas and name not in found:
                found[name] = schemas[name]
                parts.append(schemas[name])
            parts += one.values()
    return found
