/** A typed client of Killick's HTTP API. `api.d.ts` is generated from the server's OpenAPI document. */

import createClient, { type Client } from "openapi-fetch";

import type { components, paths } from "./api.js";

export type { components, paths };
export type Killick = Client<paths>;
export type Run = components["schemas"]["RunDetail"];
export type Problem = components["schemas"]["ProblemDocument"];

/** A refused request, with the server's problem document. */
export class KillickError extends Error {
  constructor(readonly problem: Problem) {
    super(problem.detail);
    this.name = "KillickError";
  }
}

/** Returns a client of the server at this URL, such as `http://127.0.0.1:8300`. */
export function connect(url: string, token: string): Killick {
  const headers = { Authorization: `Bearer ${token}` };
  return createClient<paths>({ baseUrl: url.replace(/\/+$/, ""), headers });
}

/** Returns a reply's document. Throws KillickError if the request was refused. */
export function given<T>(reply: { data?: T; error?: unknown }): T {
  if (reply.error !== undefined) throw new KillickError(reply.error as Problem);
  return reply.data as T;
}

/** Asks for a run again and again until it is as wanted. Returns it. */
export async function until(killick: Killick, run: string, wanted: (run: Run) => boolean, everyMs = 250): Promise<Run> {
  for (;;) {
    const found = given(await killick.GET("/api/v1/runs/{run}", { params: { path: { run } } }));
    if (wanted(found)) return found;
    await new Promise((resolve) => setTimeout(resolve, everyMs));
  }
}

/** Waits until a run has ended, or waits for a person, a message or a time. Returns it. */
export function settled(killick: Killick, run: string): Promise<Run> {
  return until(killick, run, ({ status }) => status !== "queued" && status !== "running");
}

/** Waits until a run has ended. Returns it. */
export function ended(killick: Killick, run: string): Promise<Run> {
  return until(killick, run, ({ ended_at }) => ended_at !== null);
}
