// The page of `jaxllm serve`: a chat, and a tree of branches of a text. Nothing is built or loaded
// from elsewhere; addresses are relative, so the page also works below a proxy's path.

const CONTINUE_TOKENS = 20;
const RETRY_MS = 1000;
const $ = (id) => document.getElementById(id);
const state = {
  key: sessionStorage.getItem("jaxllm-key") ?? "",
  chats: true, // the model has a chat template
  running: null, // the AbortController of the running task
  messages: [],
  branches: [], // {parent, at, tokens, next}: it has its parent's first `at` tokens
  current: 0,
  planted: null, // the text of the address that was planted last
};

// The server

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

async function request(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (state.key) headers.Authorization = `Bearer ${state.key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...options, headers, signal });
  if (response.ok) return response;
  throw new ServerError(response.status, (await response.json().catch(() => ({}))).error);
}

async function* stream(path, body, signal) {
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

async function run(task) {
  if (state.running) return;
  state.running = new AbortController();
  showBusy(true);
  $("alert").textContent = "";
  try {
    await task(state.running.signal);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    state.running = null;
    showBusy(false);
  }
}

function showBusy(busy) {
  document.body.classList.toggle("busy", busy);
  for (const button of document.querySelectorAll(".stop")) {
    if (!busy && button === document.activeElement) button.nextElementSibling.focus();
    button.hidden = !busy;
  }
}

function showError(error) {
  if (error.status === 401) $("key-form").hidden = false;
  const lost = "The connection to the server is lost. Is it still running?";
  $("alert").textContent = error instanceof TypeError ? lost : error.message;
  if (!(error instanceof ServerError)) console.error(error);
}

function sampling() {
  const options = { model: $("model").value };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") options[name] = Number($(name).value);
  }
  return options;
}

function checkSettings() {
  $("alert").textContent = "";
  if (!$("sampling").checkValidity()) $("settings").open = true;
  return $("sampling").reportValidity();
}

// Chat

function conversation() {
  const system = $("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...state.messages];
}

// A reload of the tab keeps the conversation.
function keepChat() {
  sessionStorage.setItem("jaxllm-chat", JSON.stringify(state.messages));
  sessionStorage.setItem("jaxllm-system", $("system").value);
}

function restoreChat() {
  $("system").value = sessionStorage.getItem("jaxllm-system") ?? "";
  if (!state.chats || state.messages.length) return;
  state.messages = JSON.parse(sessionStorage.getItem("jaxllm-chat") ?? "[]");
  for (const { role, content } of state.messages) addMessage(role, content);
  if (state.messages.length) addTools();
}

function addToLog(item) {
  $("log").append(item);
  item.scrollIntoView({ block: "nearest" });
}

function addMessage(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  addToLog(item);
  return item;
}

function addTools() {
  const item = document.createElement("li");
  item.className = "tools";
  item.append(
    makeButton("Again", () => {
      if (state.running || !checkSettings()) return;
      state.messages.pop();
      item.previousElementSibling.remove();
      run(answer);
    }),
    makeButton("Look inside", () => run(lookInside)),
    makeButton("Edit", () => {
      if (state.running) return;
      state.messages.pop();
      const answered = item.previousElementSibling;
      item.remove();
      takeBack(answered);
      keepChat();
      $("prompt").focus();
    }),
  );
  if (navigator.clipboard) { // browsers have none for pages over plain HTTP from other machines
    item.append(makeButton("Copy", async () => {
      await navigator.clipboard.writeText(state.messages.at(-1).content);
      $("status").textContent = "The answer is copied.";
    }));
  }
  addToLog(item);
}

async function answer(signal) {
  $("log").querySelector(".tools")?.remove();
  const item = addMessage("assistant", "");
  item.setAttribute("aria-busy", "true"); // is read aloud when it is complete
  const body = { ...sampling(), messages: conversation() };
  let text = "";
  try {
    for await (const choice of stream("v1/chat/completions", body, signal)) {
      const { scrollHeight, scrollTop, clientHeight } = $("talk");
      const piece = choice.delta.content ?? "";
      item.append(text ? piece : piece.trimStart());
      text += piece;
      const atEnd = scrollHeight - scrollTop - clientHeight < 60;
      if (atEnd) item.scrollIntoView({ block: "end" });
    }
  } finally {
    item.setAttribute("aria-busy", "false");
    if (text) {
      state.messages.push({ role: "assistant", content: text });
      addTools();
    } else {
      takeBack(item);
      if (!signal.aborted) $("alert").textContent = "The model ended without a text.";
    }
    keepChat();
  }
}

function takeBack(item) {
  const question = state.messages.pop();
  item.previousElementSibling.remove();
  item.remove();
  $("prompt").value ||= question.content;
  if (state.messages.length) addTools();
}

async function continueText(signal) {
  const body = { ...sampling(), prompt: $("prompt").value };
  for await (const choice of stream("v1/completions", body, signal)) {
    $("prompt").value += choice.text;
    $("prompt").scrollTop = $("prompt").scrollHeight;
  }
  $("status").textContent = "The continuation is complete.";
}

function ask(event) {
  event.preventDefault();
  const text = $("prompt").value;
  if (state.running || !text.trim() || !checkSettings()) return;
  if (state.chats) {
    state.messages.push({ role: "user", content: text });
    addMessage("user", text);
    $("prompt").value = "";
  }
  run(state.chats ? answer : continueText);
}

function clearChat() {
  if (state.running) return;
  state.messages = [];
  $("log").replaceChildren();
  keepChat();
  $("prompt").value = "";
  $("prompt").focus();
}

async function lookInside(signal) {
  const body = { model: $("model").value, messages: conversation() };
  const { tokens } = await (await request("tokenize", body, signal)).json();
  location.hash = "view=branches";
  await plant({ tokens }, signal);
}

// Branches

const ids = (branch) => branch.tokens.map((token) => token.id);
const textOf = (tokens) => tokens.map((token) => token.text).join("");

async function look(branch, prompt, signal) {
  const body = { model: $("model").value, ...prompt };
  Object.assign(branch, await (await request("page/look", body, signal)).json());
  draw();
}

async function plant(prompt, signal) {
  const branch = { parent: null, at: 0, tokens: [], next: null };
  await look(branch, prompt, signal);
  [state.branches, state.current] = [[branch], 0];
  draw();
}

function fork(index) {
  if (state.running) return;
  const tokens = state.branches[state.current].tokens.slice(0, index + 1);
  state.branches.push({ parent: state.current, at: tokens.length, tokens, next: null });
  choose(state.branches.length - 1);
}

function choose(index) {
  if (state.running) return;
  state.current = index;
  draw();
  const branch = state.branches[index];
  if (!branch.next) run((signal) => look(branch, { tokens: ids(branch) }, signal));
}

function append(id) {
  const branch = state.branches[state.current];
  run((signal) => look(branch, { tokens: [...ids(branch), id] }, signal));
}

async function grow(signal) {
  const branch = state.branches[state.current];
  const body = { ...sampling(), max_tokens: CONTINUE_TOKENS, prompt: ids(branch),
                 return_token_ids: true };
  const before = branch.tokens.length;
  try {
    for await (const choice of stream("v1/completions", body, signal)) {
      const added = choice.token_ids.map((id) => ({ id, text: "", attention: 0 }));
      if (added.length) added.at(-1).text = choice.text;
      branch.tokens.push(...added);
      branch.next = null;
      draw();
    }
  } finally {
    if (branch.tokens.length > before) await look(branch, { tokens: ids(branch) });
  }
  $("status").textContent = textOf(branch.tokens.slice(before));
}

function draw() {
  const focused = document.activeElement?.dataset.focus;
  const branch = state.branches[state.current];
  $("reading").hidden = !branch;
  if (!branch) return;
  // The first token is an attention sink: on the scale it would darken all others.
  const most = Math.max(...branch.tokens.slice(1).map((token) => token.attention), 1e-9);
  $("tokens").replaceChildren(...branch.tokens.map((token, i) => drawToken(token, i, most)));
  $("tokens").lastElementChild.tabIndex = 0;
  $("next").replaceChildren(...(branch.next ?? []).map(drawNext));
  $("tree").replaceChildren(drawBranches(null));
  if (focused) document.querySelector(`[data-focus="${focused}"]`)?.focus();
}

function drawToken(token, index, most) {
  const span = document.createElement("span");
  span.className = index ? "token" : "token sink";
  span.textContent = token.text;
  if (token.name) span.dataset.name = token.name;
  if (/^[\n\r]+$/.test(token.text)) span.classList.add("lines");
  const brightness = index ? (token.attention / most) ** 0.7 : 0; // small shares are visible too
  span.style.setProperty("--attention", brightness.toFixed(3));
  const sink = index ? "" : ", an attention sink that the scale leaves out";
  span.title = `Token ${index + 1}, id ${token.id}: ${percent(token.attention)} of the next token's`
    + ` attention${sink}. Click to fork here`;
  span.setAttribute("role", "button");
  span.tabIndex = -1;
  span.dataset.focus = `token-${index}`;
  return span;
}

function drawNext(token, rank) {
  const button = makeButton(token.name ?? token.text.replaceAll("\n", "⏎"), () => append(token.id));
  const chance = document.createElement("span");
  chance.textContent = percent(Math.exp(token.logprob));
  button.append(chance);
  button.style.setProperty("--chance", Math.exp(token.logprob).toFixed(3));
  button.title = `Append this token (id ${token.id})`;
  button.dataset.focus = `next-${rank}`;
  return button;
}

function drawBranches(parent) {
  const list = document.createElement("ul");
  state.branches.forEach((branch, i) => {
    if (branch.parent !== parent) return;
    const item = document.createElement("li");
    const own = textOf(branch.tokens.slice(branch.at)).trim();
    const button = makeButton(shorten(own) || "(nothing new yet)", () => choose(i));
    if (parent !== null) {
      const place = document.createElement("small");
      place.textContent = `after “${shorten(textOf(branch.tokens.slice(0, branch.at)), 18, true)}”`;
      button.prepend(place);
    }
    if (i === state.current) button.setAttribute("aria-current", "true");
    button.dataset.focus = `branch-${i}`;
    item.append(button);
    if (state.branches.some((other) => other.parent === i)) item.append(drawBranches(i));
    list.append(item);
  });
  return list;
}

function moveFocus(event) {
  const tokens = [...$("tokens").children];
  const index = tokens.indexOf(event.target);
  const places = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: tokens.length - 1 };
  if (event.key === "Enter" || event.key === " ") fork(index);
  else if (!(event.key in places)) return;
  event.preventDefault();
  const target = tokens[places[event.key]];
  if (!target) return;
  event.target.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}

function makeButton(text, act) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", act);
  return button;
}

function percent(share) {
  return share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

function shorten(text, length = 60, end = false) {
  const characters = [...text];
  if (characters.length <= length) return text;
  return end ? `…${characters.slice(-length).join("")}` : `${characters.slice(0, length).join("")}…`;
}

// The address (#view=branches&text=...) and the start

const address = () => new URLSearchParams(location.hash.slice(1));

function showView() {
  const view = address().get("view") === "branches" ? "branches" : "chat";
  for (const name of ["chat", "branches"]) {
    $(name).hidden = name !== view;
    if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
  $("forest").hidden = view === "chat";
}

function readText() {
  const text = address().get("text");
  if (!text || text === state.planted) return;
  state.planted = text;
  $($("chat").hidden ? "text" : "prompt").value = text;
  if ($("chat").hidden) run((signal) => plant({ text }, signal));
}

async function start(signal) {
  const info = await (await waitUntilReady("tokenizer_info", signal)).json();
  const models = (await (await request("v1/models", null, signal)).json()).data;
  $("key-form").hidden = true;
  $("alert").textContent = "";
  $("model").replaceChildren(...models.map(({ id }) => new Option(id)));
  $("models").hidden = models.length < 2;
  $("name").textContent = models.length < 2 ? models[0].id : "";
  state.chats = Boolean(info.chat_template);
  document.body.classList.toggle("writes", !state.chats);
  restoreChat();
  $("log").dataset.empty = "Write the first message below.";
  if (state.chats) return;
  $("prompt-label").textContent = "Text to continue (this model has no chat template)";
  $("prompt-help").textContent = "The model continues your text in its field.";
  $("send").textContent = "Continue";
  $("clear").textContent = "Clear";
}

async function waitUntilReady(path, signal) {
  for (;;) {
    try {
      return await request(path, null, signal);
    } catch (error) {
      if (error.status !== 503) throw error;
      $("alert").textContent = "The model is loading. This page waits for it.";
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

async function begin() {
  await run(start);
  if ($("model").options.length) readText();
}

$("ask").addEventListener("submit", ask);
$("clear").addEventListener("click", clearChat);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || !state.chats) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("plant").addEventListener("submit", (event) => {
  event.preventDefault();
  run((signal) => plant({ text: $("text").value }, signal));
});
$("tokens").addEventListener("click", ({ target }) => {
  const index = [...$("tokens").children].indexOf(target);
  if (index >= 0) fork(index);
});
$("tokens").addEventListener("keydown", moveFocus);
$("system").addEventListener("change", keepChat);
$("more").addEventListener("click", () => checkSettings() && run(grow));
$("sampling").addEventListener("submit", (event) => event.preventDefault());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value.trim();
  sessionStorage.setItem("jaxllm-key", state.key);
  begin();
});
for (const button of document.querySelectorAll(".stop")) {
  button.addEventListener("click", () => state.running?.abort());
}
addEventListener("hashchange", () => {
  showView();
  readText();
});
$("settings").open = matchMedia("(min-width: 50rem)").matches;
showView();
begin();
