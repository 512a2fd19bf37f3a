// What both views use: the server, one task at a time, the settings, and what the browser keeps.

export const $ = (id) => document.getElementById(id);

// The browser keeps the last values for new tabs, and each tab's own for a reload. It may refuse
// to: then they last as long as the page.

const AREAS = ["sessionStorage", "localStorage"];
const place = (name) => `jaxllm ${location.pathname} ${name}`;

export function keep(name, value, areas = AREAS) {
  try {
    for (const area of areas) window[area].setItem(place(name), JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function recall(name, areas = AREAS) {
  try {
    const texts = areas.map((area) => window[area].getItem(place(name)));
    return JSON.parse(texts.find((text) => text !== null) ?? null);
  } catch {
    return null;
  }
}

export const page = {
  key: recall("key", ["sessionStorage"]) ?? "",
  chats: true, // the model has a chat template
  running: null, // the AbortController of the running task
};

// The server. Addresses are relative, so the page also works below a proxy's path.

class ServerError extends Error {
  constructor(status, error = {}) {
    super(explain(status, error));
    this.status = status;
  }
}

function explain(status, error) {
  const message = error.message ?? `status ${status}`;
  if (status === 401) return "This server requires an API key. Enter yours below.";
  if (error.code === "context_length_exceeded") {
    return `This is too long for the model: ${message}. Shorten it or start anew.`;
  }
  if (status === 429) return `The server is busy: ${message}.`;
  if (status === 503) return `The server is not ready: ${message}.`;
  if (status >= 500) return `The server failed: ${message}.`;
  return `The server refused this: ${message}.`;
}

export async function request(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (page.key) headers.Authorization = `Bearer ${page.key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...options, headers, signal });
  if (response.ok) return response;
  throw new ServerError(response.status, (await response.json().catch(() => ({}))).error);
}

export async function* stream(path, body, signal) {
  const response = await request(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("the stream has no end");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new ServerError(500, chunk.error);
      yield chunk.choices[0];
    }
  }
}

// One task at a time; Stop aborts it.

export async function run(task) {
  if (page.running) return;
  page.running = new AbortController();
  showBusy(true);
  showAlert("");
  try {
    await task(page.running.signal);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    page.running = null;
    showBusy(false);
  }
}

function showBusy(busy) {
  document.body.classList.toggle("busy", busy);
  for (const button of document.querySelectorAll(".primary")) button.ariaDisabled = busy;
  for (const button of document.querySelectorAll(".stop")) {
    if (!busy && button === document.activeElement) button.nextElementSibling.focus();
    button.hidden = !busy;
  }
}

function showError(error) {
  const lost = "The connection to the server is lost. Is it still running?";
  showAlert(error instanceof TypeError ? lost : error.message);
  if (!(error instanceof ServerError)) console.error(error);
  if (error.status !== 401) return;
  $("key-form").hidden = false;
  $("key").focus();
}

export function showAlert(text) {
  $("alert").textContent = text;
}

// Settings

const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];

export function sampling() {
  const options = { model: $("model").value };
  for (const name of SAMPLING) if ($(name).value !== "") options[name] = Number($(name).value);
  return options;
}

export function checkSettings() {
  showAlert("");
  if (!$("sampling").checkValidity()) $("settings").open = true;
  return $("sampling").reportValidity();
}

export function keepSettings() {
  const names = [...SAMPLING, "system", "model"];
  keep("settings", Object.fromEntries(names.map((name) => [name, $(name).value])));
}

export function restoreSettings() {
  for (const [name, value] of Object.entries(recall("settings") ?? {})) $(name).value = value;
  if (!$("model").value) $("model").selectedIndex = 0; // the server has that model no more
}

// Elements

export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function makeButton(text, act) {
  const button = make("button", "", text);
  button.type = "button";
  button.addEventListener("click", act);
  return button;
}
