// refund.ts
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, tool } from "ai";
import { connect, ended, given, settled } from "killick-client";
import { z } from "zod";

const { KILLICK_URL, KILLICK_TOKEN, OPENAI_BASE_URL, OPENAI_API_KEY } = process.env;
const killick = connect(KILLICK_URL!, KILLICK_TOKEN!);
const models = createOpenAICompatible({ name: "models", baseURL: OPENAI_BASE_URL!, apiKey: OPENAI_API_KEY });

const refund = tool({
  description: "Refunds an order. A manager has to approve it.",
  inputSchema: z.object({ number: z.number().int(), amount: z.number().int() }),
  execute: async (order, { toolCallId }) => {
    const id = `refund/${toolCallId}`; // the same call again is the same run
    given(await killick.POST("/api/v1/runs", { body: { agent: "refund", input: order, id } }));
    const run = await settled(killick, id);
    return { run: run.id, status: run.status, result: run.result };
  },
});

const { text } = await generateText({
  model: models("gpt-5-mini"),
  tools: { refund },
  stopWhen: isStepCount(5),
  prompt: "Refund order 17: it cost 120.",
});
console.log(text);

for (const { id, run, prompt, digest } of given(await killick.GET("/api/v1/inbox")).questions) {
  console.log(`${run} asks: ${prompt}`);
  const body = { verb: "approve" as const, digest };
  given(await killick.POST("/api/v1/inbox/{wait}", { params: { path: { wait: id } }, body }));
  console.log((await ended(killick, run)).result);
}
