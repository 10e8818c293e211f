// The page: a form becomes a request, its events become coloured text and figures.

import { Counts } from "./counts.js";
import { ApiError, read, stream } from "./stream.js";
import {
  Turn, element, say, showAgainst, showError, showExamples, showFigures, showMode, showServer,
  showState,
} from "./view.js";

const POLL_SECONDS = 2;
const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

const form = element("ask");
const prompt = element("prompt");
let talk = newTalk(); // the chat so far
let running = null; // the AbortController of the request that runs
let model = null;
let isChosen = false; // whether somebody has switched between chat and completion
let last = null; // the newest whole answer: what was asked, its text, its pace
let refused = null; // the key that the server did not take

const mode = () => form.elements.mode.value;
const number = (id) => element(id).valueAsNumber;
const key = () => element("key").value.trim();

/** A conversation: its messages, and a name under which the server may keep what it read. */
function newTalk() {
  const name = Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(36));
  return { messages: [], name: name.join("-") };
}

/** The body of a request, from the form. */
function body(asked, text) {
  const seed = number("seed");
  const sampling = {
    model,
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    seed: Number.isNaN(seed) ? crypto.getRandomValues(new Uint32Array(1))[0] : seed,
  };
  if (asked === "completion") return { ...sampling, prompt: text };
  const messages = [...talk.messages, { role: "user", content: text }];
  return { ...sampling, messages, prompt_cache_key: talk.name };
}

async function generate(text) {
  const asked = mode();
  const spoken = talk;
  const turn = new Turn(asked, text);
  const counts = new Counts(performance.now());
  begin();
  last = null;
  let reason = "stopped";
  try {
    await ready();
    const sent = body(asked, text);
    for await (const event of stream(PATHS[asked], key(), sent, running.signal)) {
      reason = take(event, turn, counts) ?? reason;
    }
    last = { path: PATHS[asked], sent, text: turn.text, pace: counts.pace() };
    if (asked === "chat") remember(spoken, text, turn.text);
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : "failed";
    if (reason === "failed") fail(error);
    if (asked === "chat" && turn.text) remember(spoken, text, turn.text);
  }
  turn.end(reason, counts.figures());
  finish(reason, turn);
}

/** The newest answer once more without the drafter: how much faster it was with it. */
async function compare() {
  if (last === null || running !== null) return;
  const { path, sent, text, pace } = last;
  const plain = new Counts(performance.now());
  const asked = { ...sent, draft: false };
  delete asked.prompt_cache_key;
  let said = "";
  begin();
  showAgainst("Decoding the same prompt plainly...");
  try {
    for await (const event of stream(path, key(), asked, running.signal)) {
      const { spans, accepted, stats } = event.specctl ?? {};
      said += (spans ?? []).join("");
      plain.add({ accepted, stats }, performance.now());
    }
    showAgainst(pace, plain.pace(), said === text);
  } catch (error) {
    showAgainst("The comparison was broken off.");
    if (error.name !== "AbortError") fail(error);
  }
  end();
}

/** One event of the stream; returns why the answer ended, if it did. */
function take(event, turn, counts) {
  const [choice] = event.choices ?? [];
  const { spans, accepted, stats } = event.specctl ?? {};
  const text = choice?.text ?? choice?.delta?.content ?? "";
  if (spans) turn.add(spans, accepted);
  else if (text) turn.add([text], [false]);
  counts.add({ accepted, stats }, performance.now());
  if (turn.box.isConnected) showFigures(counts.figures());
  return choice?.finish_reason;
}

function remember({ messages }, text, answer) {
  messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
}

/** Ask for the name of the model, once. */
async function ready() {
  if (model !== null) return;
  const [first] = (await read("v1/models", key())).data;
  model = first.id;
  element("model").textContent = model;
  if (first.chat_template && !isChosen) form.elements.mode.value = "chat";
  showMode(mode());
  showExamples(mode(), begun);
}

/** An example is chosen. */
function begun(text) {
  if (running !== null) return;
  prompt.value = text;
  form.requestSubmit();
}

function begin() {
  running = new AbortController();
  showError(null);
  element("stop").disabled = false;
  element("send").disabled = true;
  element("compare").disabled = true;
  showAgainst("");
  element("transcript").setAttribute("aria-busy", "true");
  say("Generating.");
  setTimeout(look, 200);
}

function end() {
  running = null;
  element("stop").disabled = true;
  element("send").disabled = false;
  element("compare").disabled = last === null || last.pace === null;
  element("transcript").removeAttribute("aria-busy");
}

function finish(reason, turn) {
  end();
  if (reason === "failed" && !turn.text) {
    turn.box.remove();
    prompt.value ||= turn.asked.textContent;
    element("welcome").hidden = document.querySelector(".turn") !== null;
  } else if (turn.box.isConnected) {
    say(`Done: ${turn.summary.textContent}.`);
  }
  look();
}

function fail(error) {
  showError(error instanceof ApiError ? error : new ApiError(`This page failed: ${error.message}`));
  if (error.status === 401) {
    element("settings").open = true;
    element("key").focus();
  }
}

/** The server's state, as long as somebody looks at the page. */
async function look() {
  if (document.hidden || key() === refused) return;
  try {
    await ready();
    showServer(await read("v1/status", key()));
    refused = null;
  } catch (error) {
    if (error.status === 401) refused = key();
    showState(error.status === 401 ? "needs an API key" : "out of reach", "bad");
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (running !== null || !text.trim()) return;
  prompt.value = "";
  generate(text);
});

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

element("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});

element("compare").addEventListener("click", compare);

element("clear").addEventListener("click", () => {
  running?.abort();
  talk = newTalk();
  last = null;
  element("compare").disabled = true;
  showAgainst("");
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  element("welcome").hidden = false;
  showError(null);
  showFigures(new Counts(0).figures());
  prompt.focus();
});

element("colours").addEventListener("change", (event) => {
  element("transcript").classList.toggle("plain", !event.target.checked);
});

// What is folded away cannot be mended: an invalid setting is shown.
element("settings").addEventListener("invalid", () => { element("settings").open = true; }, true);
element("key").addEventListener("change", look);
document.addEventListener("visibilitychange", look);
for (const choice of form.elements.mode) {
  choice.addEventListener("change", () => {
    isChosen = true;
    showMode(mode());
    showExamples(mode(), begun);
  });
}

showExamples(mode(), begun);
if (matchMedia("(max-width: 860px)").matches) element("settings").open = false;
setInterval(look, 1000 * POLL_SECONDS);
look();
prompt.focus();
