"""Random histories that are valid: what people, models and tools may say to each other, in each provider's form.

A seed settles everything. A `Session` plays the model and the tools: it reads what it was sent, answers, calls tools,
asks for pages that left (and for some that never were), and is interrupted. It knows nothing of how a window works.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple

WORDS = tuple(
    re.findall(r"\S+", "anchor ballast cable deck ebb fathom gale hull inlet jib keel lee mast naïve quay reef 潮 ⚓")
)
PATHS = ("src/a.py", "src/long name.py", "docs/ünïcode.md", "data.json", "README", 'q"uote.txt')
ODD = (
    "",
    " ",
    "\n",
    "null",
    "{}",
    "[]",
    "0",
    "\x00\x7f",
    "🜁" * 7,
    "\u202eright to left",
    'say "m3" or m3.1',
    "</s>",
    "Error: x",
)
FAKE = '[left the window: read_file src/a.py, 2,140 tokens; recall("m1") brings it back]'

Answering = Callable[[str, Any], "tuple[str, bool] | None"]
"""Who is asked first what a call gives: the text, and whether it failed; None where the tool is to be run."""


class Call(NamedTuple):
    id: str
    name: str
    arguments: Any
    """A dict, or text that is no JSON object."""


class Given(NamedTuple):
    """What a tool gave: texts and images, in order, or one bare text."""

    parts: tuple[tuple[str, str], ...]
    bare: bool = True
    error: bool = False


def prose(rng: Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, words)))


def picture(rng: Random) -> str:
    return base64.b64encode(rng.randbytes(rng.choice((30, 300, 3000)))).decode()


# The three forms ----------------------------------------------------------------------------------


class Chat:
    """OpenAI's chat completions."""

    shape = "openai"
    made = 0

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def system(self, text: str) -> list[Any]:
        content = self.rng.choice((text, [{"type": "text", "text": text}]))
        return [{"role": self.rng.choice(("system", "developer")), "content": content}]

    def user(self, parts: Sequence[tuple[str, str]]) -> list[Any]:
        named = {"name": "pat-1"} if self.rng.random() < 0.1 else {}
        if len(parts) == 1 and parts[0][0] == "text" and self.rng.random() < 0.7:
            return [{"role": "user", "content": parts[0][1]} | named]
        return [{"role": "user", "content": [self._part(*part) for part in parts]} | named]

    def _part(self, kind: str, value: str) -> Any:
        match kind:
            case "image":
                return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{value}"}}
            case "document":
                data = base64.b64encode(value.encode()).decode()
                return {
                    "type": "file",
                    "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{data}"},
                }
            case _:
                return {"type": "text", "text": value}

    def reply(self, thought: str, text: str, calls: Sequence[Call], refused: bool) -> list[Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if refused:
            message = self.rng.choice((
                {"role": "assistant", "content": None, "refusal": text},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": text}]},
            ))  # fmt: skip
        elif text and self.rng.random() < 0.2:
            message["content"] = [{"type": "text", "text": text}]
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written(call)}}
                for call in calls
            ]
        elif message["content"] is None and not refused:
            message["content"] = ""
        return [message]

    def results(self, answers: Sequence[tuple[Call, Given]], words: Sequence[tuple[str, str]]) -> list[Any]:
        told = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": given.parts[0][1]
                if given.bare
                else [{"type": "text", "text": text} for _, text in given.parts],
            }
            for call, given in answers
        ]
        return [*told, *(self.user(words) if words else ())]

    def tool(self, name: str, about: str, schema: Any, strict: bool) -> Any:
        function: dict[str, Any] = {"name": name, "description": about, "parameters": schema}
        return {"type": "function", "function": function | ({"strict": True} if strict else {})}

    def foreign_tools(self) -> list[Any]:
        grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+" * 900}}
        return [{"type": "custom", "custom": {"name": "shout", "description": prose(self.rng, 400), "format": grammar}}]


class Responses(Chat):
    """OpenAI's Responses."""

    shape = "openai-responses"

    def _id(self, kind: str) -> str:
        self.made += 1
        return f"{kind}_{self.made:04x}"

    def system(self, text: str) -> list[Any]:
        content = self.rng.choice((text, [{"type": "input_text", "text": text}]))
        return [{"role": self.rng.choice(("system", "developer")), "content": content}]

    def user(self, parts: Sequence[tuple[str, str]]) -> list[Any]:
        kind = {"type": "message"} if self.rng.random() < 0.5 else {}
        if len(parts) == 1 and parts[0][0] == "text" and self.rng.random() < 0.7:
            return [kind | {"role": "user", "content": parts[0][1]}]
        return [kind | {"role": "user", "content": [self._part(*part) for part in parts]}]

    def _part(self, kind: str, value: str) -> Any:
        match kind:
            case "image":
                return {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{value}"}
            case "document":
                data = base64.b64encode(value.encode()).decode()
                return {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{data}"}
            case _:
                return {"type": "input_text", "text": value}

    def reply(self, thought: str, text: str, calls: Sequence[Call], refused: bool) -> list[Any]:
        items = list[Any]()
        if thought:
            summary = [{"type": "summary_text", "text": thought}] if self.rng.random() < 0.5 else []
            items.append(
                {"type": "reasoning", "id": self._id("rs"), "summary": summary, "encrypted_content": "gAAAA" * 9}
            )
        if self.rng.random() < 0.1:
            action = {"type": "search", "query": prose(self.rng, 3)}
            items.append({"type": "web_search_call", "id": self._id("ws"), "status": "completed", "action": action})
        if text and not calls and not thought and not refused and self.rng.random() < 0.3:
            items.append({"role": "assistant", "content": text})
        elif text or refused:
            said = {"type": "output_text", "text": text, "annotations": []}
            part = {"type": "refusal", "refusal": text} if refused else said
            message = {"type": "message", "id": self._id("msg"), "role": "assistant", "status": "completed"}
            items.append(message | {"content": [part]})
        for call in calls:
            item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": written(call)}
            items.append(item | self.rng.choice(({}, {"id": self._id("fc"), "status": "completed"})))
        if not items or items[-1]["type" if "type" in items[-1] else "role"] == "reasoning":
            items.append({"role": "assistant", "content": "."})
        return items

    def results(self, answers: Sequence[tuple[Call, Given]], words: Sequence[tuple[str, str]]) -> list[Any]:
        told = [
            {
                "type": "function_call_output",
                "call_id": call.id,
                "output": given.parts[0][1] if given.bare else [self._part(*part) for part in given.parts],
            }
            for call, given in answers
        ]
        return [*told, *(self.user(words) if words else ())]

    def tool(self, name: str, about: str, schema: Any, strict: bool) -> Any:
        return {"type": "function", "name": name, "description": about, "parameters": schema, "strict": strict}

    def foreign_tools(self) -> list[Any]:
        return [{"type": "web_search"}, {"type": "custom", "name": "shout", "description": prose(self.rng, 400)}]


class Anthropic(Chat):
    """Anthropic's messages. Users and models take turns, so that words of a user follow the results in one message."""

    shape = "anthropic"

    def system(self, text: str) -> list[Any]:
        return []

    def user(self, parts: Sequence[tuple[str, str]]) -> list[Any]:
        if len(parts) == 1 and parts[0][0] == "text" and self.rng.random() < 0.6:
            return [{"role": "user", "content": parts[0][1]}]
        return [{"role": "user", "content": [self._part(*part) for part in parts]}]

    def _part(self, kind: str, value: str) -> Any:
        match kind:
            case "image":
                return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": value}}
            case "document":
                source = {"type": "text", "media_type": "text/plain", "data": value}
                return {"type": "document", "source": source, "title": "A paper"}
            case _:
                return {"type": "text", "text": value if value.strip() else "."}

    def reply(self, thought: str, text: str, calls: Sequence[Call], refused: bool) -> list[Any]:
        blocks = list[Any]()
        if thought:
            clear = {"type": "thinking", "thinking": thought, "signature": "sig" + thought[:9]}
            blocks.append(self.rng.choice((clear, {"type": "redacted_thinking", "data": "EmwKAh" * 9})))
        if self.rng.random() < 0.1:
            blocks += self._searched()
        if text.strip() or not calls:
            blocks.append({"type": "text", "text": text if text.strip() else "."})
        blocks += [
            {
                "type": "tool_use",
                "id": c.id,
                "name": c.name,
                "input": c.arguments if isinstance(c.arguments, dict) else {},
            }
            for c in calls
        ]
        if [block["type"] for block in blocks] == ["text"] and self.rng.random() < 0.5:
            return [{"role": "assistant", "content": blocks[0]["text"]}]
        return [{"role": "assistant", "content": blocks}]

    def _searched(self) -> list[Any]:
        """What the provider ran itself, within the reply."""
        self.made += 1
        found = {"type": "web_search_result", "title": "A", "url": "https://a.org", "encrypted_content": "Eo8B" * 200}
        return [
            {"type": "server_tool_use", "id": f"srvtoolu_{self.made}", "name": "web_search", "input": {"query": "a"}},
            {"type": "web_search_tool_result", "tool_use_id": f"srvtoolu_{self.made}", "content": [found]},
        ]

    def results(self, answers: Sequence[tuple[Call, Given]], words: Sequence[tuple[str, str]]) -> list[Any]:
        blocks = list[Any]()
        for call, given in answers:
            block: dict[str, Any] = {"type": "tool_result", "tool_use_id": call.id}
            if given.bare and (given.parts[0][1] or self.rng.random() < 0.5):
                block["content"] = given.parts[0][1]
            elif not given.bare:
                block["content"] = [self._part(*part) for part in given.parts]
            if given.error or self.rng.random() < 0.1:
                block["is_error"] = given.error
            blocks.append(block)
        return [{"role": "user", "content": [*blocks, *(self._part(*part) for part in words)]}]

    def tool(self, name: str, about: str, schema: Any, strict: bool) -> Any:
        tool: dict[str, Any] = {"name": name, "description": about, "input_schema": schema}
        return tool | ({"strict": True} if strict else {}) | self.rng.choice(({}, {"type": "custom"}))

    def foreign_tools(self) -> list[Any]:
        return [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3, "allowed_domains": ["a.org"] * 50}]


FORMS: dict[str, type[Chat]] = {form.shape: form for form in (Chat, Responses, Anthropic)}


def written(call: Call) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)


# Tools --------------------------------------------------------------------------------------------


def tools_of(form: Chat, rng: Random, *, most: int = 40) -> list[Any]:
    """None at all to a great many; tiny to huge; names that are the window's own, and long and odd ones."""
    if rng.random() < 0.1:
        return []
    names = ["read_file", "write_file", "search", "run_tests", "fetch", "look"]
    names += [name for name in ("recall", "find_tools", "killick_recall", "a-B_9", "x" * 64) if rng.random() < 0.15]
    names += [
        f"crm_{word}-{at}" for at, word in enumerate(rng.choices(("get", "put", "list"), k=rng.randint(0, most - 12)))
    ]
    tools = [form.tool(name, *_described(rng, name)) for name in names]
    if rng.random() < 0.2:
        tools += form.foreign_tools()
    rng.shuffle(tools)
    return tools


def _described(rng: Random, name: str) -> tuple[str, Any, bool]:
    width = rng.choice((0, 1, 2, 30)) if name.startswith("crm") else 1
    fields: dict[str, Any] = {
        f"{rng.choice(('path', 'größe', 'x y'))}{at}": {"type": "string", "description": prose(rng, 12)}
        for at in range(width)
    }
    if width > 2:
        fields["deep"] = {"type": "array", "items": {"type": "object", "properties": {}, "additionalProperties": False}}
    strict = rng.random() < 0.2
    schema: dict[str, Any] = {"type": "object", "properties": fields}
    if strict:
        schema |= {"required": list(fields), "additionalProperties": False}
    return prose(rng, rng.choice((1, 8, 60))), schema, strict


def name_of(tool: Any) -> str:
    about = tool.get("function") or tool.get("custom") or tool
    return str(about.get("name", ""))


# The session --------------------------------------------------------------------------------------


class Session:
    """A conversation that grows turn by turn, with the model, the tools and the user played by chance."""

    def __init__(self, seed: int, shape: str, *, marks: bool = True, size: int = 400) -> None:
        self.rng = Random(f"{seed} {shape}")
        self.form = FORMS[shape](self.rng)
        self.size = size
        self.tools = tools_of(self.form, self.rng)
        self.system: Any = None
        if shape != "openai" and self.rng.random() < 0.7:
            self.system = prose(self.rng, self.rng.choice((5, 200)))
        self.moving = marks and shape == "anthropic" and self.rng.random() < 0.5
        self.in_place = self.rng.random() < 0.4
        if shape == "anthropic" and marks:
            self._mark_what_stands()
        self.versions = dict.fromkeys(PATHS, 0)
        self.calls = 0
        self.known: set[str] = {name_of(tool) for tool in self.tools}
        self.history: list[Any] = []
        if shape != "anthropic" and self.rng.random() < 0.7:
            self.history += self.form.system(prose(self.rng, self.rng.choice((5, 300))))
        self.history += self.form.user(self._words())
        self.ends = [len(self.history)]
        """How long the history was before each reply."""

    def _mark_what_stands(self) -> None:
        plain = all(tool.get("type", "custom") == "custom" for tool in self.tools)
        if self.tools and self.rng.random() < 0.5 and plain:
            self.tools[-1]["cache_control"] = {"type": "ephemeral"}
        if self.system and self.rng.random() < 0.5:
            self.system = [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]

    def given(self) -> list[Any]:
        """The history as its owner hands it over, with the newest words of the user marked for the cache if so: mostly
        copies, as they come over a wire; or the very objects that were given before, changed where they stand."""
        messages: list[Any] = self.history if self.in_place else deepcopy(self.history)
        if self.moving:
            blocks = [
                block for message in messages if isinstance(message["content"], list) for block in message["content"]
            ]
            for block in blocks:
                block.pop("cache_control", None)
            for message in [message for message in messages if message["role"] == "user"][-2:]:
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
                message["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return messages

    def turn(self, seen: Sequence[Any], tools: Sequence[Any], answering: Answering) -> None:
        """The model replies to what it was sent, and its calls are answered; a user speaks where it made none."""
        rng = self.rng
        own = [name_of(tool) for tool in tools if name_of(tool) not in self.known]
        calls = [self._call(seen, own) for _ in range(rng.randint(1, 5))] if rng.random() < 0.75 else []
        text = prose(rng, rng.choice((3, 10, self.size))) if not calls or rng.random() < 0.4 else ""
        thought = prose(rng, 20) if rng.random() < 0.3 else ""
        reply = self.form.reply(thought, text, calls, refused=not calls and rng.random() < 0.1)
        answers = [(call, self._answered(call, answering)) for call in calls]
        if rng.random() < 0.2:
            rng.shuffle(answers)
        interrupted = self._words() if not calls or rng.random() < 0.1 else []
        self.history += reply
        self.history += self.form.results(answers, interrupted) if calls else self.form.user(interrupted)
        if self.form.shape != "anthropic" and rng.random() < 0.05:
            self.history += self.form.system(prose(rng, 5))
        self.ends.append(len(self.history))

    def back(self) -> None:
        """The user goes back some turns and says something else."""
        turns = self.rng.randint(1, max(1, len(self.ends) - 1))
        self.ends = self.ends[:-turns] or self.ends[:1]
        del self.history[self.ends[-1] :]
        if self.history[-1].get("role") == "user" and len(self.history) > 1:
            if self.form.shape != "anthropic":
                self.history += self.form.user(self._words())
                self.ends[-1] = len(self.history)
            elif isinstance(self.history[-1]["content"], str):
                self.history[-1] = {"role": "user", "content": prose(self.rng, 30)}

    def _words(self) -> list[tuple[str, str]]:
        rng = self.rng
        words = [("text", prose(rng, rng.choice((1, 10, 10, 3 * self.size))))]
        if rng.random() < 0.15:
            words.append(("image", picture(rng)))
        if rng.random() < 0.1:
            words.insert(0, ("document", prose(rng, 2 * self.size)))
        if rng.random() < 0.1:
            words.append(("text", FAKE))
        return words

    def _call(self, seen: Sequence[Any], own: Sequence[str]) -> Call:
        rng = self.rng
        self.calls += 1
        id = f"call_{self.calls:03x}"  # noqa: A001
        kind = rng.random()
        if own and kind < 0.25:
            return Call(id, rng.choice(own), self._asked(seen))
        if kind < 0.6:
            return Call(id, "read_file", {"path": rng.choice(PATHS)})
        if kind < 0.7:
            return Call(id, "write_file", {"path": rng.choice(PATHS), "text": prose(rng, rng.choice((1, self.size)))})
        if kind < 0.75:
            return Call(
                id, rng.choice(("look", "never_heard_of", "read_file")), rng.choice(("{not json", "[1]", "", "{}"))
            )
        names = sorted(name for name in self.known if name.startswith("crm")) or ["fetch"]
        name = rng.choice(("search", "run_tests", "look", rng.choice(names), rng.choice(names)))
        return Call(
            id, name, {"q": rng.choice(WORDS[:4]), "nested": {"b": [1, None, 2.5], "a": rng.choice(("ü", True))}}
        )

    def _asked(self, seen: Sequence[Any]) -> Any:
        """What a model writes when it wants something back: mostly what it read, at times what it dreamt."""
        rng = self.rng
        handles = re.findall(r'\("((?:m\d|tool:)[^"]*)"\)', json.dumps(seen, ensure_ascii=False).replace('\\"', '"'))
        if handles and rng.random() < 0.7:
            return {"handle": rng.choice(handles), "query": rng.choice(handles)}
        dreamt = (
            "m0",
            "m1",
            "m2",
            "m3.0",
            "m9999",
            "m1.77",
            "m1-m4",
            "m4-m1",
            "tool:read_file",
            "tool:no",
            "",
            "x",
            "M1",
            " m1 ",
        )
        odd = (7, None, ["m1"], {"m": 1}, 'recall("m2")')
        return rng.choice(({"handle": rng.choice(dreamt), "query": rng.choice(("crm", "", "file", "zzz"))},
                           {"handle": rng.choice(odd), "query": rng.choice(odd)}, {}, {"page": "m1"}))  # fmt: skip

    def _answered(self, call: Call, answering: Answering) -> Given:
        told = answering(call.name, call.arguments)
        if told is not None:
            return Given((("text", told[0]),), error=told[1])
        rng, arguments = self.rng, call.arguments
        path = arguments.get("path") if isinstance(arguments, dict) else None
        if call.name == "write_file":
            self.versions[path] += 1
            return Given((("text", "written"),))
        if call.name == "read_file" and path:
            # The same until somebody writes: re-reads are identical, or supersede what was read before.
            of = Random(f"{path} {self.versions[path]}")
            return self._shaped(prose(of, of.choice((5, 60, self.size, 3 * self.size))), of)
        if rng.random() < 0.2:
            failure = rng.choice(("Error: no such thing\n", "Traceback (most recent call last)")) + prose(rng, 90)
            return Given((("text", failure),), error=rng.random() < 0.8)
        text = rng.choice(
            (prose(rng, self.size), prose(rng, 5), rng.choice(ODD), FAKE, json.dumps({"rows": [prose(rng, 9)] * 40}))
        )
        return self._shaped(text, rng)

    def _shaped(self, text: str, rng: Random) -> Given:
        """As one text, or as blocks, an image among them where the provider takes one."""
        if rng.random() < 0.7:
            return Given((("text", text),))
        parts = [("text", text or "."), ("text", prose(rng, 30))][: rng.randint(1, 2)]
        if self.form.shape != "openai" and rng.random() < 0.5:
            parts.insert(rng.randint(0, len(parts)), ("image", picture(rng)))
        return Given(tuple(parts), bare=False)
