// The page of `jaxllm serve`: its start, its views and their addresses. Nothing is built or loaded
// from elsewhere.

import { plant } from "./branches.js";
import { keepChat } from "./chat.js";
import {
  $, keep, keepSettings, page, request, restoreSettings, run, showAlert,
} from "./shared.js";

const RETRY_MS = 1000;
let planted = null; // the text of the address that was planted last

// The address is #view=branches&text=...

const address = () => new URLSearchParams(location.hash.slice(1));

function showView() {
  const view = address().get("view") === "branches" ? "branches" : "chat";
  for (const name of ["chat", "branches"]) {
    $(name).hidden = name !== view;
    if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
  $("forest").hidden = view === "chat";
  $("system").parentElement.hidden = view !== "chat";
}

function readText() {
  const text = address().get("text");
  if (!text || text === planted) return;
  planted = text;
  $($("chat").hidden ? "text" : "prompt").value = text;
  if ($("chat").hidden) run((signal) => plant({ text }, signal));
}

async function start(signal) {
  const info = await (await waitUntilReady("tokenizer_info", signal)).json();
  const models = (await (await request("v1/models", null, signal)).json()).data;
  $("key-form").hidden = true;
  showAlert("");
  $("model").replaceChildren(...models.map(({ id }) => new Option(id)));
  $("models").hidden = models.length < 2;
  $("name").textContent = models.length < 2 ? models[0].id : "";
  restoreSettings();
  page.chats = Boolean(info.chat_template);
  document.body.classList.toggle("writes", !page.chats);
  if (page.chats) return;
  $("prompt-label").textContent = "Text to continue (this model has no chat template)";
  $("prompt-help").textContent = "The model continues your text in its field.";
  $("send").textContent = "Continue";
  $("clear").textContent = "Clear";
  $("clear").title = "Deletes this text";
}

async function waitUntilReady(path, signal) {
  for (;;) {
    try {
      return await request(path, null, signal);
    } catch (error) {
      if (error.status !== 503) throw error;
      showAlert("The model is loading. This page waits for it.");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

async function begin() {
  await run(start);
  if ($("model").options.length) readText();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  page.key = $("key").value.trim();
  keep("key", page.key, ["sessionStorage"]);
  begin();
});
$("sampling").addEventListener("submit", (event) => event.preventDefault());
$("sampling").addEventListener("input", () => showAlert(""));
$("sampling").addEventListener("change", keepSettings);
$("model").addEventListener("change", keepSettings);
for (const button of document.querySelectorAll(".stop")) {
  button.addEventListener("click", () => page.running?.abort());
}
addEventListener("hashchange", () => {
  showView();
  readText();
});
addEventListener("pagehide", keepChat);
$("settings").open = matchMedia("(min-width: 50rem)").matches;
showView();
begin();
