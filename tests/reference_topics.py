"""What is in the Python reference: its topics and their names, their guides, and words that many entries share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Topic(NamedTuple):
    """A page: its title, its first sentences, the guide that teaches most of it, and its names by module.

    A name with `!` is a class that people make, so its entry has a signature. One with `~` has its methods in a table.
    """

    title: str
    opening: str
    guide: str
    names: Mapping[str, str]


TOPICS: Final = {
    "agents": Topic(
        "Agents",
        "Declare agents and state machines, call models in a loop, and keep requests within a token budget.",
        "running.md",
        {
            "killick": "agent machine Next! WaitFor! Done! Agent durable loop loop_sync Toolset! Window! Workspace! "
            "Secret!",
            "killick.llm.loop": "LoopResult",
            "killick.window": "Sent",
        },
    ),
    "tools": Topic(
        "Tools",
        "Declare tools: their effect class, retries and rate limits, and how they are reconciled and compensated.",
        "effects.md",
        {
            "killick": "tool open_tool Retry! Limit! Effect Happened! DidNotHappen! Unknown! Tool KEY Key STEP "
            "ToolStep TX Tx WORKSPACE Resource!",
        },
    ),
    "run": Topic(
        "Run",
        "The first argument of an agent. The methods of `Run` are awaited, except `now`, `uuid`, `random`, `patched` "
        "and `hosting`; `stream` is an async iterator. `SyncRun`, for plain `def` agents, has the same methods and "
        "blocks in them.",
        "running.md",
        {"killick": "Run SyncRun Answer Child", "killick.engine.approval.call_answer": "Proposed CallAnswer"},
    ),
    "client": Topic(
        "Client",
        "Open a store, start runs, read them, and act on them. Every method of `Client` is awaited on `AsyncClient`, "
        "except `worker`, `host`, `as_sync` and `as_async`.",
        "running.md",
        {
            "killick": "open open_async Client AsyncClient Handle AsyncHandle RunInfo Wait State",
            "killick.engine.views": "Listed",
            "killick.engine.outcome": "RunOutcome",
            "killick.client.operations": "Editor",
            "killick.client.maintenance": "Maintenance",
            "killick.workers.trigger_runner": "TriggerControl",
            "killick.history.search.query": "Finder",
            "killick.llm.external": "Host",
        },
    ),
    "contracts": Topic(
        "Approvals and contracts",
        "Require approvals, and evaluate every intention of an agent by rules: `killick.Contract`, `killick.rules`.",
        "contracts.md",
        {
            "killick": "Contract! read_contract Approval!",
            "killick.rules": "allow deny arguments paths budget once total after context check Reject! Ask! "
            "Rule rule_of",
        },
    ),
    "triggers": Topic(
        "Triggers and hooks",
        "Start agents by time, condition or event (`killick.triggers`), and react to run events (`killick.on`, "
        "`killick.webhook`).",
        "triggers.md",
        {
            "killick.triggers": "cron every when on_event Firing Previous TriggerInfo",
            "killick": "on webhook email slack",
            "killick.workers.hooks": "HookEvent",
            "killick.workers.answer_links": "links",
            "killick.workers.webhooks": "webhook_verify",
        },
    ),
    "testing": Topic(
        "Testing",
        "Play runs in tests, script models, interrupt agents everywhere, and replay production runs: "
        "`killick.testing`. The clocks of `killick.clock` are arguments of `killick.open`.",
        "testing.md",
        {
            "killick.testing": "play Play BlockingPlay scripted ScriptedModel call turn refusal always in_order sample "
            "interrupt_everywhere check Case! replay Replayed",
            "killick.clock": "Clock~ SystemClock~ ManualClock!~ LeapingClock!~",
        },
    ),
    "stores": Topic(
        "Stores",
        "Where logs are kept: `killick.store`. `killick.open` takes the same URLs and options.",
        "stores.md",
        {
            "killick.store": "open_store namespaces MemoryStore!~ SqliteStore!~",
            "killick.store.postgres.store": "PostgresStore!~",
            "killick.store.redis.store": "RedisStore!~",
            "killick.store.protocol": "Store~",
        },
    ),
    "web": Topic(
        "The web app",
        "The dashboard and the HTTP API as an ASGI app: `killick.web`. Needs the extra `web`.",
        "serving.md",
        {"killick.web": "asgi Limits!", "killick.workers.tokens": "Person!"},
    ),
}

FRAMEWORKS: Final = {
    "langgraph": ("langgraph.md", "KillickSaver!~ Gate!~ Waiting Stopped ToolFailed"),
    "langgraph.middleware": ("langgraph.md", "KillickMiddleware!~"),
    "langgraph.deepagents": ("deepagents.md", "create_deep_agent"),
    "langchain_approvals": ("langgraph.md", "hitl_request answer"),
    "openai_agents": ("openai-agents.md", "KillickRunner!~ KillickSession!~ attempt"),
    "pydantic_ai": ("pydantic-ai.md", "KillickDurability!~ GatedToolset!~"),
    "mcp": ("mcp.md", "Server!~"),
    "mcp_server": ("mcp.md", "server"),
    "claude_agent": ("claude-agent.md", "KillickSessionStore!~ attempt gated"),
    "crewai": ("crewai.md", "KillickFlowPersistence!~ gated recorded KillickTool!~ Waiting ToolFailed"),
    "autogen": ("autogen.md", "KillickStates!~ KillickWorkbench!~ KillickModelClient!~ run"),
    "agent_framework": (
        "agent-framework.md",
        "KillickChat!~ KillickTools!~ KillickCheckpointStorage!~ KillickHistory!~ KillickSessions!~ Waiting",
    ),
    "google_adk": ("google-adk.md", "gated run KillickSessions!~"),
    "llamaindex": ("llamaindex.md", "gated KillickRuntime!~"),
    "strands": ("strands.md", "gated run KillickSessions!~"),
    "temporal": ("temporal.md", "Temporal!~"),
    "temporal_gate": ("temporal.md", "ActivityGate!"),
    "restate": ("restate.md", "Restate!~"),
    "inngest": ("inngest.md", "Inngest!~"),
    "opentelemetry": ("opentelemetry.md", "instrument"),
}
"""The adapters, in the order of their page: the guide of each, and its public names."""

GUIDES: Final = {
    name: guide
    for guide, names in {
        "changing-code.md": "Run.patched",
        "checking.md": "check interrupt_everywhere Case",
        "contracts.md": "Client.rejudge",
        "encryption.md": "Client.store.erase Client.store.rotate_keys",
        "finding.md": "Finder Client.find",
        "approvals-elsewhere.md": "email slack links",
        "hooks.md": "on webhook HookEvent webhook_verify",
        "hosting.md": "Host Run.hosting Client.host",
        "intervening.md": "Client.pause Client.cancel Client.resume Editor",
        "keeping.md": "Secret Client.store.export Client.store.prune",
        "neighbours/durable.md": "durable",
        "people.md": "Answer Proposed CallAnswer Wait Approval Run.ask Run.propose Run.wait Run.remarks Client.answer "
        "Client.inbox Client.send Client.say",
        "proof.md": "Client.store.seal Client.store.prove",
        "replaying.md": "replay Replayed Client.replay",
        "showing.md": "Client.diff",
        "state-machine.md": "machine Next WaitFor Done",
        "state.md": "State Client.state",
        "time.md": "Client.rewind Client.fork Client.undo Client.undoing",
        "transactions.md": "Tx TX",
        "triggers.md": "TriggerControl",
        "verifying.md": "Maintenance Client.store.verify",
        "window.md": "Window Sent Run.fit",
        "workers.md": "Client.worker Client.advance Client.advance_due",
        "workspace.md": "Workspace WORKSPACE Client.restore",
    }.items()
    for name in names.split()
}
"""The guide of a name, if it is not the guide of its topic or class."""

TWINS: Final = {
    "SyncRun": ("killick", "Run", "they block"),
    "AsyncClient": ("killick", "Client", "they are awaited"),
    "AsyncHandle": ("killick", "Handle", "they are awaited, and `follow` is an async iterator"),
    "BlockingPlay": ("killick.testing", "Play", "they block"),
}
"""Classes with the methods of another: its module and name, and how they differ."""

GROUPS: Final = {
    "Editor": "Client.edit",
    "Maintenance": "Client.store",
    "TriggerControl": "Client.triggers",
    "Finder": "Client.find",
}
"""Classes of the groups of a client's methods, and how these are reached."""

LIKE: Final = {
    "machine": "agent", "loop_sync": "loop", "open_async": "open", "webhook": "on", "Listed": "RunInfo",
    "email": "on", "slack": "on",
    "triggers.every": "triggers.cron", "triggers.when": "triggers.cron", "triggers.on_event": "triggers.cron",
    "Window.plan": "Window.fit", "Window.render": "Window.fit", "Window.answering": "Window.answer",
    "Host.ask": "Run.ask", "Host.model": "Run.model", "Run.stream": "Run.model", "Run.send": "Run.wait",
    "Window.unpin": "Window.pin", "Window.page": "Window.pin", "Window.resident": "Window.pin",
}  # fmt: skip
"""Entries that take parameters of another, which says what they mean."""

HIDDEN: Final = {
    "Agent": "digest_of checked",
    "BlockingPlay": "close",
    "Client": "runtime",
    "Contract": "path_arguments counts_family totals",
    "Limit": "bucket pool count per_seconds",
    "Listed": "of",
    "Play": "note held fail end log",
    "Retry": "delay_seconds",
    "ScriptedModel": "fresh",
    "Secret": "recorded",
    "State": "as_written waiting output_of",
    "Tool": "is_plain",
    "ToolStep": "tell in_agent replaying inner",
    "Toolset": "bind reads",
    "Tx": "end",
    "Workspace": "begin of",
}
"""Public members that are for other parts of Killick, by class."""

COMMON: Final = {
    "agent": ("Agent", "the agent, or its name"),
    "after": ("int", "the number of the event after which to start"),
    "args": ("Any", "the positional arguments of the call"),
    "because": ("str | None", "the reason, for the record"),
    "by": ("str | None", "the name of the person or program that acts, for the record"),
    "at": ("int | None", "the number of an event; by default the last"),
    "body": ("Any", "the content"),
    "changes": ("Any", "new values, by entry"),
    "child": ("Child", "the child run"),
    "clock": ("Clock | None", "the clock; by default the system's"),
    "client": ("Client", "the client whose store keeps the runs"),
    "contract": ("Contract", "the contract that evaluates the calls"),
    "compensate": ("bool", "undo the effects of the run"),
    "dry_run": ("bool", "return what would be done, and change nothing"),
    "duration": ("Duration", "seconds, or text such as `90s`, `15m`, `3d`"),
    "fn": ("Callable | None", "the decorated function"),
    "host": ("Host", "the host that records the calls; by default the active one"),
    "id": ("str | None", "the id of the new run or message; generated by default"),
    "ids": ("Ids | None", "the source of ids; random by default"),
    "input": ("Any", "the input of the agent"),
    "kwargs": ("Any", "the keyword arguments of the call"),
    "key": ("str | None", "identifies the call; by default its name and arguments do"),
    "llm": ("", "the model"),
    "limit": ("int", "the maximum number of results"),
    "moment": ("datetime", "the time, with a time zone"),
    "note": ("Any", "the note"),
    "now_us": ("int", "the time, in microseconds since the epoch"),
    "options": ("Any", "the further options"),
    "owner": ("str | None", "keeps the snapshot from being pruned"),
    "params": ("", "the parameters of the statement"),
    "path": ("", "the path of the file"),
    "paths": ("", "only files at and below these paths"),
    "priority": ("int | None", "workers take higher priorities first; by default the priority of the agent"),
    "progress": ("", "a function that receives the progress"),
    "result": ("Any", "the result"),
    "root": ("Id", "the id of a snapshot"),
    "rows": ("", "the parameters, for each execution"),
    "run": ("str", "the id of the run"),
    "seq": ("int", "the number of the event"),
    "space": ("str", "the prefix of the logs' ids"),
    "sql": ("str", "the statement"),
    "stage": ("str", "the stage"),
    "stages": ("Sequence[str]", "the stages"),
    "step": ("str", "the number of the step, such as `6`"),
    "store": ("Client", "an open client, which stays open, or the location of a store"),
    "tags": ("Sequence[str]", "tags that listings can select by"),
    "text": ("str", "the text"),
    "timeout": ("", "how long to wait; by default without limit"),
    "tool": ("Tool", "the tool to call"),
    "turn": ("str | None", "the id of the message that is answered"),
    "tx": ("Any", "the caller's own connection to the store's database; the change counts when the caller commits"),
    "waits": ("Sequence[Wait]", "open waits, as `kd.inbox` returns them"),
}
"""Parameters that many functions take: their type and meaning, used if a docstring does not give one."""

VARIABLES: Final = {
    "KILLICK_BUILD": "the version of the agents' code that runs record; by default that of the package or repository",
    "KILLICK_PUBLIC_URL": "the address of `killick serve` as people reach it, for answer links",
    "KILLICK_LINK_SECRET": "the secret that signs answer links, at least 16 bytes, or `file:PATH`; during rotation "
    "two, with a space between them",
    "KILLICK_LINK_EXPIRES": "how long an answer link holds, such as `3d`; a day by default",
    "KILLICK_SECRET_KEY": "the key that signs the sessions of `killick serve`, at least 32 characters; give all "
    "servers of one store the same key",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "whether traces carry the content of messages",
    "XDG_DATA_HOME": "the folder for vaults of stores that are no file; `~/.local/share` by default",
    "XDG_STATE_HOME": "the folder for the keys of local servers, and for the names of workspaces used here; "
    "`~/.local/state` by default",
}
"""What the library reads from its environment, in addition to the command line."""

URLS: Final = (
    ("`killick.db`, `sqlite:///killick.db`, `sqlite:////var/lib/killick.db`", "a SQLite file", ""),
    ("`memory:`", "memory of this process", ""),
    (
        "`postgresql://user@host/database`",
        "PostgreSQL; needs the extra `postgres`",
        "`namespace`: a separate store, in the schema `killick_NAME`; `pooler=transaction`: behind a transaction "
        "pooler. Others are passed to libpq, such as `sslmode`.",
    ),
    (
        "`redis://host/0`, `rediss://`, `unix://`, `valkey://`, `valkeys://`",
        "Redis or Valkey; needs the extra `redis`",
        "`namespace`: a separate store, under the key prefix `{killick_NAME}:`. Others are passed to redis-py, such as "
        "`db`.",
    ),
)
"""The URLs of stores: how they are written, where the store is, and what the query of the URL may say."""
