import createClient from "openapi-fetch";

import type { paths } from "./api";

const [url, token] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url, headers: { Authorization: `Bearer ${token}` } });

function given<T>(reply: { data?: T; error?: unknown }): T {
  if (reply.data === undefined) throw new Error(JSON.stringify(reply.error));
  return reply.data;
}

const listed = given(await client.GET("/api/v1/runs"));
const run = listed.runs[0]!.id;
const shown = given(await client.GET("/api/v1/runs/{run}", { params: { path: { run } } }));
const asked = given(await client.GET("/api/v1/inbox"));
const question = asked.questions[0]!;
const body = { verb: "approve" as const, digest: question.digest };
given(await client.POST("/api/v1/inbox/{wait}", { params: { path: { wait: question.id } }, body }));
console.log(JSON.stringify([run, shown.status, question.prompt]));
