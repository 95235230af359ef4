"""Starting runs and speaking to them: the agents that are declared here, a run of one, a message."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from killick.definitions.agents import AGENTS, AnyAgent
from killick.errors import AgentUnknown
from killick.presenting import previews
from killick.presenting.documents import Document
from killick.presenting.previews import RunPreview
from killick.web.forms import JsonSchema
from killick.web.handlers.operations import CommandRequest, CommandResult, Name, Priority, schema_of
from killick.web.idempotency import derived
from killick.web.problems import Problem
from killick.web.routes import Call, Created, RunAsked, get, post


class AgentsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Which agent the form is for."""

    agent: (
        Annotated[str, msgspec.Meta(max_length=200, description="The agent that the page shows a form for.")] | None
    ) = None


class AgentInfo(Document, frozen=True):
    """An agent that is declared here. `schema` is of its input; `takes_input` is False where it takes none."""

    name: str
    about: str
    takes_input: bool
    schema: JsonSchema | None
    priority: int
    contract: str | None
    aliases: tuple[str, ...]


class AgentList(msgspec.Struct, frozen=True, kw_only=True):
    """The agents that are declared in this process."""

    agents: tuple[AgentInfo, ...]
    chosen: str | None


class StartRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run to be started. The same id again, with the same agent and input, is the same run."""

    agent: Name
    input: Any = None
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    priority: Priority | None = None
    subject: Annotated[Name, msgspec.Meta(description="In an encrypted store: whose data it is.")] | None = None
    tags: Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=200)]], msgspec.Meta(max_length=50)] = []


class StartedRun(Created, frozen=True, kw_only=True):
    """A run that is there, and due."""

    run: str
    agent: str
    status: str
    did: str


class MessageRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message. It waits until the run asks for its name; the same id again counts once."""

    name: Name
    body: Any = None
    id: Name | None = None


@get("/agents", page="start.html", at=("/start",))
def agents(call: Call[AgentsAsked, Any]) -> AgentList:
    """The agents that are declared here, with their inputs."""
    grant = call.person.grant
    declared = [
        each for each in AGENTS.declared.values() if grant is None or each.name in (grant.agents or [each.name])
    ]
    lines = [_line(agent) for agent in sorted(declared, key=lambda agent: agent.name)]
    chosen = call.asked.agent or (lines[0].name if len(lines) == 1 else None)
    if chosen is not None and chosen not in [line.name for line in lines]:
        raise AgentUnknown(chosen, known=[line.name for line in lines])
    return AgentList(agents=tuple(lines), chosen=chosen)


def _line(agent: AnyAgent) -> AgentInfo:
    contract, about = agent.options.contract, (agent.__doc__ or "").strip().partition("\n")[0]
    return AgentInfo.of(
        agent, about=about, schema=schema_of(agent.input_type) if agent.takes_input else None,
        priority=agent.options.priority, contract=None if contract is None else contract.name,
        aliases=agent.options.aliases,
    )  # fmt: skip


@post("/runs", status=201, natural=True)
def start(call: Call[Any, StartRequest]) -> StartedRun:
    """Start a run: durable, and due for the next worker."""
    body, client, grant = call.body, call.client, call.person.grant
    agent = AGENTS.get(body.agent)
    if grant is not None and not grant.covers(agent.name, body.tags):
        reason = f"{call.person.name} reaches {grant} alone; start a run of that, with its tags"
        raise Problem(403, reason, code="grant_too_small")
    run = body.id or derived(call, body.agent)
    existed = run is not None and client.runtime.store.head(run) is not None
    handle = client.start(
        agent, body.input, id=run, priority=body.priority, tags=tuple(body.tags),
        by=call.person.name, subject=body.subject,
    )  # fmt: skip
    row = client.runtime.store.index(handle.id)
    did = "is there already; the same id is the same run" if existed else "started; it continues when a worker takes it"
    return StartedRun(
        location=call.url("/api/v1/runs/{run}", run=handle.id), run=handle.id, agent=body.agent,
        status=row.status if row is not None else "queued", did=f"{handle.id} {did}",
    )  # fmt: skip


@post("/runs/{run}/messages", natural=True)
def send(call: Call[RunAsked, MessageRequest]) -> CommandResult:
    """Send a message to a run; it waits there until the run asks for its name."""
    body, client = call.body, call.client
    run = RunPreview(client, call.asked.run)
    if body.dry_run:
        preview = previews.send(run, body.name)
        return CommandResult(run=run.run, will=preview.will, more=preview.more)
    message = body.id or derived(call, "msg")
    if message is not None and client.runtime.store.message(run.run, message) is not None:
        return CommandResult(run=run.run, did=f"{message} was sent before; the same id counts once")
    client.send(run.run, body.name, body.body, id=message, by=call.person.name)
    return CommandResult(run=run.run, did=f"{body.name} sent")
