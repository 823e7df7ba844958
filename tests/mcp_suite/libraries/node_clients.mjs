// ``node node_clients.mjs LIBRARY JSON``: the seven checks of python_clients.py, of one client library for Node.
//
// The libraries are installed in the folder ``modules`` of the JSON object.

import { spawnSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [library, text] = process.argv.slice(2);
const server = JSON.parse(text);
const require = createRequire(join(server.modules, "index.js"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const seen = { asked: 0, progress: 0 };
const client = { name: "check", version: "1" };
const entry = server.url === null ? { command: server.command[0], args: server.command.slice(1) } : { url: server.url };
const timeout = 60_000;
const accept = () => {
  seen.asked += 1;
  return { action: "accept", content: { decision: "once" } };
};
const onprogress = () => (seen.progress += 1);

const byName = (tools) => Object.fromEntries(tools.map((tool) => [tool.name, tool]));

// Each library returns the names that it lists, a way to call them, and one to close it.
const libraries = {
  async "ts-sdk"() {
    const { Client } = await load("@modelcontextprotocol/sdk/client/index.js");
    const { ElicitRequestSchema } = await load("@modelcontextprotocol/sdk/types.js");
    const stdio = await load("@modelcontextprotocol/sdk/client/stdio.js");
    const http = await load("@modelcontextprotocol/sdk/client/streamableHttp.js");
    const made = new Client(client, { capabilities: { elicitation: {} } });
    made.setRequestHandler(ElicitRequestSchema, accept);
    const there =
      server.url === null
        ? new stdio.StdioClientTransport(entry)
        : new http.StreamableHTTPClientTransport(new URL(server.url));
    await made.connect(there);
    return {
      names: (await made.listTools()).tools.map((tool) => tool.name),
      call: (name, args, signal) =>
        made.callTool({ name, arguments: args }, undefined, { onprogress, signal, timeout }),
      close: () => made.close(),
    };
  },
  "ts-client": () => official("auto"),
  "ts-client-legacy": () => official("legacy"),
  async "ai-sdk"() {
    const { createMCPClient, ElicitationRequestSchema } = await load("@ai-sdk/mcp");
    const { Experimental_StdioMCPTransport } = await load("@ai-sdk/mcp/mcp-stdio");
    const transport = server.url === null ? new Experimental_StdioMCPTransport(entry) : { type: "http", ...entry };
    const made = await createMCPClient({ transport, capabilities: { elicitation: {} } });
    made.onElicitationRequest(ElicitationRequestSchema, accept);
    const tools = await made.tools();
    return {
      names: Object.keys(tools),
      call: (name, args, abortSignal) => tools[name].execute(args, { toolCallId: "1", messages: [], abortSignal }),
      close: () => made.close(),
    };
  },
  async mastra() {
    const { MCPClient } = await load("@mastra/mcp");
    const there = server.url === null ? entry : { url: new URL(server.url) };
    const made = new MCPClient({ servers: { handrail: { ...there, timeout, inputRequests: accept } }, timeout });
    const tools = await made.listTools();
    return {
      names: Object.keys(tools),
      call: (name, args, abortSignal) => tools[name].execute(args, { abortSignal }),
      close: () => made.disconnect(),
    };
  },
  async "langchain-js"() {
    const { MultiServerMCPClient } = await load("@langchain/mcp-adapters");
    const there = server.url === null ? { transport: "stdio", ...entry } : { transport: "http", ...entry };
    const made = new MultiServerMCPClient({ mcpServers: { handrail: there }, onProgress: onprogress });
    const tools = byName(await made.getTools());
    return {
      names: Object.keys(tools),
      call: (name, args, signal) => tools[name].invoke({ type: "tool_call", id: "1", name, args }, { signal }),
      close: () => made.close(),
    };
  },
  async "openai-agents-js"() {
    const { MCPServerStdio, MCPServerStreamableHttp } = await load("@openai/agents");
    const more = { clientSessionTimeoutSeconds: 60, timeout };
    const made =
      server.url === null
        ? new MCPServerStdio({ ...entry, ...more })
        : new MCPServerStreamableHttp({ ...entry, ...more });
    await made.connect();
    return {
      names: (await made.listTools()).map((tool) => tool.name),
      call: (name, args) => made.callTool(name, args),
      close: () => made.close(),
    };
  },
  async genkit() {
    const { GenkitMcpClient } = await load("@genkit-ai/mcp");
    const { genkit } = await load("genkit");
    const ai = genkit({});
    const made = new GenkitMcpClient({ name: "handrail", mcpServer: entry });
    await made.ready();
    const tools = Object.fromEntries((await made.getActiveTools(ai)).map((tool) => [tool.__action.name, tool]));
    return { names: Object.keys(tools), call: (name, args) => tools[name](args), close: () => made.disable() };
  },
};

async function official(mode) {
  const { Client, StreamableHTTPClientTransport } = await load("@modelcontextprotocol/client");
  const { StdioClientTransport } = await load("@modelcontextprotocol/client/stdio");
  const made = new Client(client, { capabilities: { elicitation: { form: {} } }, versionNegotiation: { mode } });
  made.setRequestHandler("elicitation/create", accept);
  const there =
    server.url === null ? new StdioClientTransport(entry) : new StreamableHTTPClientTransport(new URL(server.url));
  await made.connect(there);
  return {
    names: (await made.listTools()).tools.map((tool) => tool.name),
    call: (name, args, signal) => made.callTool({ name, arguments: args }, { onprogress, signal, timeout }),
    close: () => made.close(),
  };
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Whether a program with this word in its command line runs on the machine. */
function running(marker) {
  return readdirSync("/proc")
    .filter((name) => /^\d+$/.test(name))
    .some((name) => {
      try {
        return readFileSync(`/proc/${name}/cmdline`, "latin1").split("\0").includes(marker);
      } catch {
        return false;
      }
    });
}

/** Wait for a condition of another process, which nothing else reports. */
async function until(condition, limit) {
  for (const end = Date.now() + limit; Date.now() < end; await pause(20)) if (condition()) return true;
  return condition();
}

async function check(opened, found) {
  const plain = Object.fromEntries(opened.names.map((name) => [name.replace(/^.*handrail[_/]+/, ""), name]));
  const missing = ["read", "bash", "call_tool", "test_tool_with_progress"].filter((name) => !(name in plain));
  found.list = missing.length ? `without ${missing}` : "ok";
  const said = async (name, args, signal) => {
    try {
      return JSON.stringify(await opened.call(plain[name] ?? name, args, signal)) ?? "";
    } catch (error) {
      return `${error}`;
    }
  };
  let answer = await said("read", { path: "notes.txt" });
  found.call = answer.includes("forty-two") ? "ok" : answer;
  answer = await said("read", { path: "dot.png" });
  found.image = /iVBORw0KGgo|image\/png/.test(answer) ? "ok" : answer;
  answer = await said("read", { path: "absent.txt" });
  found.error = answer.includes("absent.txt") && answer.includes("exist") ? "ok" : answer;
  const wanted = { path: `made-${process.hrtime.bigint()}.txt`, content: "made" };
  const made = () => existsSync(join(server.workspace, wanted.path));
  answer = await said("write", wanted);
  const waiting = answer.match(/apr_\w+/);
  if (made()) found.ask = seen.asked ? "ok" : "written without a question";
  else if (waiting === null) found.ask = answer;
  else {
    const [command, ...args] = server.approve;
    const approved = spawnSync(command, [...args, waiting[0], "--once"], { encoding: "utf8" });
    answer = await said("write", wanted);
    found.ask = made() ? "parked" : `${approved.stderr}${answer}`;
  }
  answer = await said("test_tool_with_progress", {});
  found.progress = !answer.includes("three times") ? answer : seen.progress ? "ok" : "-";
  const marker = `60.${process.hrtime.bigint() % 1_000_000_000n}`;
  const stop = new AbortController();
  let ended = null;
  said("bash", { command: `tail -s ${marker} -f /dev/null` }, stop.signal).then((text) => (ended = text));
  if (!(await until(() => running(marker) || ended !== null, timeout)) || ended !== null) {
    found.cancel = `the program did not start: ${ended}`;
    return null;
  }
  stop.abort();
  found.cancel = (await until(() => !running(marker), 3000)) ? "ok" : "";
  return marker;
}

const found = {};
try {
  const opened = await libraries[library]();
  const marker = await check(opened, found);
  await Promise.race([opened.close(), pause(10_000)]);
  if (found.cancel === "")
    found.cancel = (await until(() => !running(marker), 10_000))
      ? "at close"
      : "the program runs on after the client has closed";
} catch (error) {
  console.error(error);
  found["cancel" in found ? "close" : "list"] = `${error}`;
}
console.log(JSON.stringify(found));
process.exit(0);
