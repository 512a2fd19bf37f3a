// The branch view: a text as tokens, and the tree of its branches.

import { $, checkSettings, make, makeButton, page, request, run, sampling, stream } from "./shared.js";

const CONTINUE_TOKENS = 20;
const tree = {
  branches: [], // {parent, at, tokens, next}: it has its parent's first `at` tokens
  current: 0,
};

const ids = (branch) => branch.tokens.map((token) => token.id);
const textOf = (tokens) => tokens.map((token) => token.text).join("");

async function look(branch, prompt, signal) {
  const body = { model: $("model").value, ...prompt };
  Object.assign(branch, await (await request("page/look", body, signal)).json());
  draw();
}

export async function plant(prompt, signal) {
  const branch = { parent: null, at: 0, tokens: [], next: null };
  await look(branch, prompt, signal);
  [tree.branches, tree.current] = [[branch], 0];
  draw();
}

function fork(index) {
  if (page.running) return;
  const tokens = tree.branches[tree.current].tokens.slice(0, index + 1);
  tree.branches.push({ parent: tree.current, at: tokens.length, tokens, next: null });
  choose(tree.branches.length - 1);
}

function choose(index) {
  if (page.running) return;
  tree.current = index;
  draw();
  const branch = tree.branches[index];
  if (!branch.next) run((signal) => look(branch, { tokens: ids(branch) }, signal));
}

function append(id) {
  const branch = tree.branches[tree.current];
  run((signal) => look(branch, { tokens: [...ids(branch), id] }, signal));
}

async function grow(signal) {
  const branch = tree.branches[tree.current];
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
  const branch = tree.branches[tree.current];
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
  const span = make("span", index ? "token" : "token sink", token.text);
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
  button.append(make("span", "", percent(Math.exp(token.logprob))));
  button.style.setProperty("--chance", Math.exp(token.logprob).toFixed(3));
  button.title = `Append this token (id ${token.id})`;
  button.dataset.focus = `next-${rank}`;
  return button;
}

function drawBranches(parent) {
  const list = make("ul", "");
  tree.branches.forEach((branch, i) => {
    if (branch.parent !== parent) return;
    const item = make("li", "");
    const own = textOf(branch.tokens.slice(branch.at)).trim();
    const button = makeButton(shorten(own) || "(nothing new yet)", () => choose(i));
    if (parent !== null) {
      const before = shorten(textOf(branch.tokens.slice(0, branch.at)), 18, true);
      button.prepend(make("small", "", `after “${before}”`));
    }
    if (i === tree.current) button.setAttribute("aria-current", "true");
    button.dataset.focus = `branch-${i}`;
    item.append(button);
    if (tree.branches.some((other) => other.parent === i)) item.append(drawBranches(i));
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

function percent(share) {
  return share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

function shorten(text, length = 60, end = false) {
  const characters = [...text];
  if (characters.length <= length) return text;
  return end ? `…${characters.slice(-length).join("")}` : `${characters.slice(0, length).join("")}…`;
}

$("plant").addEventListener("submit", (event) => {
  event.preventDefault();
  run((signal) => plant({ text: $("text").value }, signal));
});
$("tokens").addEventListener("click", ({ target }) => {
  const index = [...$("tokens").children].indexOf(target);
  if (index >= 0) fork(index);
});
$("tokens").addEventListener("keydown", moveFocus);
$("more").addEventListener("click", () => checkSettings() && run(grow));
