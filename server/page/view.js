// What is shown: turns with coloured tokens, figures, bars, the server's state. No HTML is parsed:
// every text becomes a text node.

export const element = (id) => document.getElementById(id);

const ENDS = {
  stop: "the answer ended",
  length: "the limit of tokens was reached",
  content_filter: "the answer was cut",
  stopped: "stopped",
  failed: "broken off",
};

const EXAMPLES = {
  chat: ["Write a function that adds two numbers", "Write a loop over a list", "What is a stack?"],
  completion: ["def fibonacci(n):\n", "class Stack:\n    ", "import os\n\ndef main("],
};

/** A question and its answer in the transcript. */
export class Turn {
  constructor(mode, prompt) {
    const who = (name) => make("p", "who", name);
    this.asked = make("p", "asked", prompt);
    this.answer = make("p", "answer waiting");
    this.summary = make("p", "summary");
    const parts = [this.asked, this.answer, this.summary];
    const named = [who("You"), this.asked, who("Model"), this.answer, this.summary];
    this.box = make("article", `turn ${mode}`);
    this.box.append(...(mode === "chat" ? named : parts));
    element("welcome").hidden = true;
    element("transcript").append(this.box);
    this.follow(true);
  }

  /** Text of tokens; neighbours of one kind share an element. */
  add(spans, accepted) {
    const wasAtEnd = this.isAtEnd();
    spans.forEach((text, i) => {
      if (text) this.tail(accepted[i] ? "accepted" : "own").data += text;
    });
    this.follow(wasAtEnd);
  }

  tail(kind) {
    let last = this.answer.lastElementChild;
    if (last?.className !== kind) {
      last = make("span", kind);
      last.append(document.createTextNode(""));
      this.answer.append(last);
    }
    return last.firstChild;
  }

  /** The end: what it was, and the figures of the answer. */
  end(reason, figures) {
    const wasAtEnd = this.isAtEnd();
    this.answer.classList.remove("waiting");
    this.summary.textContent = summary(reason, figures);
    if (this.text && navigator.clipboard) this.box.append(copyButton(() => this.text));
    this.follow(wasAtEnd);
  }

  /** What the answer says so far. */
  get text() {
    return this.answer.textContent;
  }

  isAtEnd() {
    const box = element("transcript");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  }

  follow(should) {
    const box = element("transcript");
    if (should) box.scrollTop = box.scrollHeight;
  }
}

/** One line about an answer. */
export function summary(reason, { tokens, tau, speed }) {
  const parts = [`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  if (tau) parts.push(`tau ${tau.toFixed(2)}`);
  if (speed) parts.push(`${rate(speed)} tokens/s`);
  return [...parts, ENDS[reason] ?? reason].join(" \u00b7 ");
}

/** A button that copies a text, and says so for a moment. */
function copyButton(text) {
  const button = make("button", "quiet copy", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    const done = await navigator.clipboard.writeText(text()).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Not allowed";
    say(button.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

/** Prompts to begin with; `choose` is given the one that is pressed. */
export function showExamples(mode, choose) {
  const items = EXAMPLES[mode].map((text) => {
    const item = make("li");
    const button = make("button", "example", text.trim());
    button.type = "button";
    button.addEventListener("click", () => choose(text));
    item.append(button);
    return item;
  });
  element("examples").replaceChildren(...items);
}

/** The pace of an answer against plain decoding, or a text in its place. */
export function showAgainst(pace, plain = null, isSame = false) {
  if (typeof pace === "string") return set("against", pace);
  if (!pace || !plain) return set("against", "The answer was too short to compare.");
  const times = pace / plain;
  const faster = times >= 1 ? `${times.toFixed(2)}x as fast as` : `slower (${times.toFixed(2)}x) than`;
  const same = isSame ? "the same text" : "another text";
  const speeds = `${rate(pace)} against ${rate(plain)} tokens/s behind the first token`;
  return set("against", `With the drafter ${faster} plain decoding: ${speeds}, ${same}.`);
}

/** Figures and bars beside the transcript. */
export function showFigures(figures) {
  const { tokens, rounds, tau, speed, share, firstSeconds, perPosition } = figures;
  set("tau", tau === null ? "-" : tau.toFixed(2));
  set("speed", speed === null ? "-" : rate(speed));
  set("tokens", tokens ? count(tokens) : "-");
  set("rounds", rounds ? count(rounds) : "-");
  set("share", share === null ? "-" : percent(share));
  set("first", firstSeconds === null ? "-" : duration(firstSeconds));
  const shown = perPosition.slice(0, 12);
  element("bars").replaceChildren(...shown.map(bar));
}

/** The server's state in the line at the top. */
export function showServer({ state, running, waiting, slots, speculation, drafter, why_off: why }) {
  showState(state, state === "ready" ? "good" : "bad");
  set("running", `${running} of ${slots}`);
  set("waiting", String(waiting));
  set("drafter", speculation === "on" ? drafter ?? "on" : "none");
  element("why").hidden = !why;
  set("why", why ? `Nothing is drafted now: ${why}.` : "");
}

/** Chat or completion: what the prompt is, and how it is set. */
export function showMode(mode) {
  element("ask").dataset.mode = mode;
  element("prompt").placeholder = mode === "chat" ? "Write a message" : "Write a beginning";
}

export function showState(text, kind) {
  set("state", text);
  element("state").dataset.kind = kind;
}

/** An error until the next request; null takes it away. */
export function showError(error) {
  const box = element("error");
  box.hidden = error === null;
  box.textContent = error === null ? "" : [error.message, error.remedy].filter(Boolean).join(" ");
}

/** Said to screen readers, once per event. */
export const say = (text) => set("said", text);

function bar(share, place) {
  const item = make("li");
  const room = make("span", "room");
  const height = make("span", "bar");
  height.style.setProperty("--share", share);
  room.append(make("span", "percent", percent(share)), height);
  item.append(room, make("span", "position", String(place + 1)));
  return item;
}

function make(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}

function set(id, text) {
  const found = element(id);
  if (found.textContent !== text) found.textContent = text;
}

const count = (number) => number.toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)}%`;
const rate = (speed) => (speed < 10 ? speed.toFixed(1) : count(Math.round(speed)));
const duration = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(1)} s`);
