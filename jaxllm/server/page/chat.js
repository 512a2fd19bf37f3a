// The chat: a tree of messages, of which one branch is shown. An edited message, or another answer,
// is a new branch beside the old one.

import { plant } from "./branches.js";
import {
  $, checkSettings, keep, make, makeButton, page, recall, request, run, sampling,
  showAlert, stream,
} from "./shared.js";

const KEPT_CHARACTERS = 2_000_000; // browsers keep about 5 million for a site
const CONTINUE_TOKENS = 200;
const chat = {
  nodes: [], // {parent, role, content, thought, cut}; a parent comes before its children
  last: -1, // the end of the branch that is shown
};
let deleted = null; // the chat before this one
const isTouched = matchMedia("(pointer: coarse)").matches; // its keyboard may have no Shift+Enter

// The tree

function branchTo(node) {
  const branch = [];
  for (let i = node; i >= 0; i = chat.nodes[i].parent) branch.unshift(i);
  return branch;
}

function versionsOf(node) {
  const { parent } = chat.nodes[node];
  return [...chat.nodes.keys()].filter((i) => chat.nodes[i].parent === parent);
}

function addNode(node) {
  chat.last = chat.nodes.push(node) - 1;
}

// The branch goes through this node, and on along the newest messages.
function choose(node) {
  const isChild = ({ parent }) => parent === chat.last;
  chat.last = node;
  for (let i; (i = chat.nodes.findLastIndex(isChild)) >= 0; ) chat.last = i;
}

function conversation(end) {
  const system = $("system").value.trim();
  const messages = branchTo(end).map((i) => {
    const { role, content, thought } = chat.nodes[i];
    return { role, content, reasoning_content: thought || undefined };
  });
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

export function keepChat() {
  const kept = { ...chat, draft: $("prompt").value };
  const isLong = JSON.stringify(kept).length > KEPT_CHARACTERS;
  let problem = "";
  if (isLong) problem = "This chat is too long to be kept: a reload will lose what is new.";
  else if (!keep("chat", kept)) problem = "This browser keeps nothing: a reload will lose the chat.";
  $("unkept").textContent = problem;
}

function restoreChat() {
  const { draft = "", ...kept } = recall("chat") ?? {};
  $("prompt").value = draft;
  Object.assign(chat, kept);
  choose(chat.last);
  drawChat();
  scrollToEnd();
}

// The log

// Only what differs is drawn anew, since screen readers read what is added.
function drawChat() {
  const branch = branchTo(chat.last);
  const shown = [...$("log").children];
  let same = 0;
  while (same < branch.length && shown[same]?.dataset.node === String(branch[same])) same += 1;
  for (const item of shown.slice(same)) item.remove();
  $("log").append(...branch.slice(same).map(drawNode));
  $("restore").hidden = !deleted;
}

function drawNode(node) {
  const item = makeItem(chat.nodes[node]);
  item.dataset.node = node;
  item.append(makeTools(node));
  return item;
}

function makeItem(message) {
  const name = message.role === "user" ? "You:" : "Model:";
  const item = make("li", message.role, make("span", "unseen", name));
  fillItem(item, message);
  return item;
}

function fillItem(item, { content, thought, cut }) {
  let text = item.querySelector(".text");
  if (!text) item.append((text = make("div", "text")));
  if (thought && !item.querySelector("details")) {
    text.before(make("details", "", make("summary", "", "Thoughts"), make("div", "thought")));
    text.previousSibling.open = !content;
  }
  if (thought) item.querySelector(".thought").textContent = thought;
  text.replaceChildren(...makeBlocks(content));
  if (cut) text.append(make("small", "", "The answer was cut at the limit of tokens."));
}

// Fences (```) are around code; all else is shown as it is written.
function makeBlocks(content) {
  const pieces = content.trimStart().split(/^[ \t]*```.*$/m);
  const blocks = pieces.map((piece, i) => [i % 2 ? "pre" : "p", piece.replace(/^\n+|\s+$/g, "")]);
  return blocks.filter(([, piece]) => piece).map(([tag, piece]) => make(tag, "", piece));
}

function makeTools(node) {
  const { role, content, parent } = chat.nodes[node];
  const tools = make("div", "tools");
  const versions = versionsOf(node);
  if (versions.length > 1) tools.append(makeArrows(versions, versions.indexOf(node)));
  const add = (text, act) => {
    const button = makeButton(text, act);
    button.className = text.toLowerCase().replace(" ", "-");
    tools.append(button);
  };
  if (navigator.clipboard) { // browsers have none for pages over plain HTTP from other machines
    add("Copy", async () => {
      await navigator.clipboard.writeText(content.trim());
      $("status").textContent = "The message is copied.";
    });
  }
  add("Edit", () => edit(node));
  add("Again", () => respond(role === "user" ? node : parent, $("talk")));
  if (role === "assistant") add("Look inside", () => run((signal) => lookInside(node, signal)));
  return tools;
}

function makeArrows(versions, place) {
  const arrow = (name, text, step) => {
    const to = versions.at((place + step) % versions.length);
    const button = makeButton(text, () => turnTo(to, `.${name}`));
    button.className = name;
    button.ariaLabel = name === "older" ? "Older version" : "Newer version";
    return button;
  };
  const number = make("span", "", `${place + 1} of ${versions.length}`);
  return make("span", "versions", arrow("older", "‹", -1), number, arrow("newer", "›", 1));
}

const itemOf = (node) => $("log").querySelector(`[data-node="${node}"]`);

// button: what has the focus afterwards.
function turnTo(node, button) {
  if (page.running) return;
  choose(node);
  drawChat();
  keepChat();
  itemOf(node).querySelector(button).focus();
}

function edit(node) {
  if (page.running) return;
  const item = itemOf(node);
  const { parent, role, content, thought } = chat.nodes[node];
  const asks = role === "user";
  const field = make("textarea", "");
  field.ariaLabel = asks ? "Your message" : "The model's message";
  field.value = content;
  const close = () => {
    item.replaceWith(drawNode(node));
    itemOf(node).querySelector(".edit").focus();
  };
  const save = make("button", "primary", asks ? "Send" : "Save");
  const form = make("form", "", field, make("div", "row", makeButton("Cancel", close), save));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (page.running || (asks && !checkSettings())) return;
    if (!field.value.trim() || field.value === content) {
      close();
      return;
    }
    addNode({ parent, role, content: field.value, thought });
    if (asks) respond(chat.last, $("talk"));
    else turnTo(chat.last, ".edit");
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (asks) sendOnEnter(event);
  });
  item.className = "editing";
  item.replaceChildren(form);
  field.focus();
}

// Questions and answers

// focus: where the keyboard goes; the log can be scrolled with it.
async function respond(question, focus) {
  if (page.running || !checkSettings()) return;
  chat.last = question;
  drawChat();
  focus.focus();
  await run(answer);
  if ($("alert").textContent) scrollToEnd(); // there is less room
}

async function answer(signal) {
  const question = chat.last;
  const message = { parent: question, role: "assistant", content: "", thought: "" };
  const item = makeItem(message);
  item.ariaBusy = true; // is read aloud when it is complete
  $("log").append(item);
  scrollToEnd();
  keepChat();
  const body = { ...sampling(), messages: conversation(question) };
  try {
    for await (const { delta, finish_reason } of stream("v1/chat/completions", body, signal)) {
      const begins = !message.content;
      message.content += delta.content ?? "";
      message.thought += delta.reasoning_content ?? "";
      message.cut = finish_reason === "length";
      if (chat.last === question && (message.content || message.thought)) addNode(message);
      follow(() => fillItem(item, message));
      if (begins && message.content) item.querySelector("details")?.removeAttribute("open");
    }
  } finally {
    item.ariaBusy = false;
    if (chat.last === question) { // nothing came
      choose(question);
      drawChat();
      if (!signal.aborted) showAlert("The model ended without a text.");
    } else {
      item.dataset.node = chat.last;
      follow(() => item.append(makeTools(chat.last)));
    }
    keepChat();
  }
}

// Who reads the end of the log stays there.
function follow(change) {
  const { scrollHeight, scrollTop, clientHeight } = $("talk");
  change();
  if (scrollHeight - scrollTop - clientHeight < 60) scrollToEnd();
}

function scrollToEnd() {
  $("talk").scrollTop = $("talk").scrollHeight;
}

async function lookInside(node, signal) {
  const body = { model: $("model").value, messages: conversation(node) };
  const { tokens } = await (await request("tokenize", body, signal)).json();
  location.hash = "view=branches";
  await plant({ tokens }, signal);
  $("tokens").lastElementChild.focus();
}

async function continueText(signal) {
  const body = { max_tokens: CONTINUE_TOKENS, ...sampling(), prompt: $("prompt").value };
  for await (const choice of stream("v1/completions", body, signal)) {
    $("prompt").value += choice.text;
    $("prompt").scrollTop = $("prompt").scrollHeight;
  }
  $("status").textContent = "The continuation is complete.";
}

function ask(event) {
  event.preventDefault();
  const text = $("prompt").value;
  if (page.running || !text.trim() || !checkSettings()) return;
  if (!page.chats) {
    run(continueText);
    return;
  }
  // A new question takes the place of one that has no answer.
  const last = chat.nodes[chat.last];
  const parent = last?.role === "user" ? last.parent : chat.last;
  addNode({ parent, role: "user", content: text });
  $("prompt").value = "";
  respond(chat.last, $("prompt"));
}

function newChat() {
  if (page.running) return;
  if (page.chats && chat.nodes.length) {
    deleted = { ...chat };
    Object.assign(chat, { nodes: [], last: -1 });
    drawChat();
    $("status").textContent = "The old chat is deleted.";
  }
  $("prompt").value = "";
  $("prompt").focus();
  keepChat();
}

function undelete() {
  Object.assign(chat, deleted);
  deleted = null;
  drawChat();
  scrollToEnd();
  $("prompt").focus();
  keepChat();
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  if (isTouched || !page.chats) return;
  event.preventDefault();
  event.target.form?.requestSubmit();
}

$("ask").addEventListener("submit", ask);
$("prompt").addEventListener("keydown", sendOnEnter);
$("clear").addEventListener("click", newChat);
$("restore").addEventListener("click", undelete);
if (isTouched) $("prompt-help").textContent = "";
restoreChat();
