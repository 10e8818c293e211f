// The client of the API: one request, its events as they come, and errors as people can read them.

const BASE = location.origin + location.pathname; // without a name and password in front

/** What went wrong, in one sentence, and what to do about it. */
export class ApiError extends Error {
  constructor(message, remedy = "", status = 0) {
    super(message);
    this.remedy = remedy;
    this.status = status;
  }
}

/** The answer of a GET as JSON. */
export async function read(path, key) {
  const response = await ask(path, { headers: headers(key) });
  return response.json();
}

/** The events of a streamed request: parsed JSON, in order. `body` is sent as it is. */
export async function* stream(path, key, body, signal) {
  const sent = {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, specctl: true }),
    signal,
  };
  const response = await ask(path, sent);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(sentences(event.error.message));
    yield event;
  }
  throw new ApiError("The connection ended before the answer did.", "Send the prompt again.");
}

/** The data of each server-sent event. An event ends at an empty line. */
export async function* events(readable) {
  const reader = readable.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", "See whether it still runs.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const said = body.error?.message ?? `the server answered ${response.status}`;
  if (response.status === 401) {
    return new ApiError("This server wants an API key.", "Enter one under Settings.", 401);
  }
  return new ApiError(sentences(said), "", response.status);
}

/** "what; found: this; do: that" as sentences. */
export function sentences(message) {
  const parts = message.split("; ").map((part) => part.replace(/^do: /, ""));
  return parts.map((part) => `${part[0].toUpperCase()}${part.slice(1)}.`).join(" ");
}
