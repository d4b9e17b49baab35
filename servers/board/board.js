// The board: asks for the server's state once a second, draws it, cancels requests and talks to the model.
"use strict";

const byId = (id) => document.getElementById(id);
const PERIOD = 1000; // milliseconds
const BLOCK_STATES = ["free", "cached", "used", "shared"];
const LATENCIES = { time_to_first_token: "first token", inter_token_latency: "between tokens", e2e_request_latency: "whole request" };

function show(id, text) {
  byId(id).textContent = text;
}

function seconds(value) {
  if (value < 1) return `${(value * 1000).toPrecision(3)} ms`;
  return `${value.toPrecision(3)} s`;
}

function count(value) {
  return value >= 1e5 ? `${Math.round(value / 1000)}k` : Math.round(value).toLocaleString("en");
}

function share(value) {
  return value === null ? "-" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

function bytes(value) {
  return value >= 1 << 30 ? `${(value / (1 << 30)).toFixed(2)} GiB` : `${(value / (1 << 20)).toFixed(1)} MiB`;
}

function row(cells, heading) {
  const tr = document.createElement("tr");
  cells.forEach((cell, i) => {
    const td = document.createElement(heading && i === 0 ? "th" : "td");
    if (cell instanceof Node) td.append(cell);
    else td.textContent = cell;
    tr.append(td);
  });
  return tr;
}

function color(name) {
  const probe = document.createElement("i");
  probe.className = name;
  byId("blocks-text").append(probe);
  const value = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return value;
}

function context(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const drawing = canvas.getContext("2d");
  drawing.scale(scale, scale);
  return [drawing, width];
}

function drawRates(history) {
  const height = 120;
  const [drawing, width] = context(byId("rates"), height);
  const peak = Math.max(1, ...history.prompt_tokens, ...history.generation_tokens);
  for (const [values, name] of [[history.prompt_tokens, "in"], [history.generation_tokens, "out"]]) {
    drawing.strokeStyle = color(name);
    drawing.lineWidth = 2;
    drawing.beginPath();
    values.forEach((value, i) => {
      const x = width - (values.length - 1 - i) * (width / 299);
      drawing.lineTo(x, height - 2 - (value / peak) * (height - 6));
    });
    drawing.stroke();
  }
  show("peak", `peak ${count(peak)}`);
}

function drawBlocks(blocks) {
  const canvas = byId("blocks");
  const cells = blocks.cells;
  const size = cells.length > 1500 ? 7 : cells.length > 400 ? 10 : 14;
  const columns = Math.max(1, Math.floor(canvas.clientWidth / size));
  const [drawing] = context(canvas, Math.ceil(cells.length / columns) * size);
  const colors = BLOCK_STATES.map(color);
  for (let i = 0; i < cells.length; i += 1) {
    drawing.fillStyle = colors[Number(cells[i])];
    drawing.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
  }
  const legend = byId("blocks-text");
  legend.replaceChildren();
  for (const state of BLOCK_STATES) {
    const mark = document.createElement("i");
    mark.className = state;
    legend.append(mark, `${count(blocks[state])} ${state}`);
  }
  const cell = blocks.blocks_per_cell > 1 ? `; a cell is ${blocks.blocks_per_cell} blocks and shows the busiest` : "";
  legend.append(` of ${count(blocks.num_blocks)}${cell}`);
}

function drawRequests(requests) {
  const body = byId("requests").tBodies[0];
  const focused = document.activeElement && document.activeElement.dataset.request;
  body.replaceChildren(...requests.slice(0, 200).map((one) => {
    const cancel = document.createElement("button");
    cancel.type = "button";
    cancel.textContent = "Cancel";
    cancel.dataset.request = one.id;
    cancel.setAttribute("aria-label", `Cancel ${one.id}`);
    cancel.addEventListener("click", () => abort(one.id, cancel));
    const name = document.createElement("span");
    name.textContent = one.id.length > 22 ? `${one.id.slice(0, 21)}…` : one.id;
    name.title = `${one.id} ${one.path}`;
    return row([cancel, name, one.status, one.seconds.toFixed(1), one.prompt_tokens, one.cached_tokens,
      `${one.output_tokens} / ${one.max_tokens}`, one.blocks, one.preemptions]);
  }));
  if (focused) {
    const again = body.querySelector(`[data-request="${CSS.escape(focused)}"]`);
    if (again) again.focus();
  }
  byId("requests").hidden = requests.length === 0;
  const hidden = requests.length > 200 ? `${requests.length - 200} more are not shown.` : "";
  show("no-requests", requests.length === 0 ? "No request is open." : hidden);
}

function draw(state) {
  const last = (values) => (values.length ? values[values.length - 1] : 0);
  show("model", state.model);
  show("limit-text", state.bottleneck.text);
  const flag = byId("limit-flag");
  flag.replaceChildren();
  if (state.bottleneck.flag) {
    const code = document.createElement("code");
    code.textContent = state.bottleneck.flag;
    flag.append("Turn: ", code);
  }
  show("running", count(state.now.running));
  show("max-running", `of ${state.limits.max_num_seqs}`);
  show("waiting", count(state.now.waiting));
  show("swapped", count(state.now.swapped));
  show("tokens-in", count(last(state.history.prompt_tokens)));
  show("tokens-out", count(last(state.history.generation_tokens)));
  show("usage", share(state.now.kv_cache_usage));
  show("hits", share(state.now.prefix_hit_rate));
  show("acceptance", share(state.now.acceptance_rate));
  show("preemptions", count(state.now.preemptions));
  drawRates(state.history);
  drawBlocks(state.blocks);
  drawRequests(state.requests);
  byId("latencies").tBodies[0].replaceChildren(...Object.entries(LATENCIES).map(([key, name]) => {
    const found = state.latencies[key];
    return row([name, ...["p50", "p90", "p99"].map((p) => (found ? seconds(found[p]) : "-"))], true);
  }));
  byId("ledger").tBodies[0].replaceChildren(...state.ledger.map(([name, size]) => row([name, bytes(size)])));
}

async function refresh() {
  const connection = byId("connection");
  try {
    const answer = await fetch("board/state");
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    draw(await answer.json());
    connection.textContent = "live";
    connection.className = "";
  } catch (error) {
    connection.textContent = `not live: ${error.message}`;
    connection.className = "lost";
  }
  setTimeout(refresh, document.hidden ? 5 * PERIOD : PERIOD);
}

async function abort(id, button) {
  button.disabled = true;
  await fetch("abort", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ request_id: id }) });
}

// The playground

const conversation = [];
let running = null;

function bubble(role, text) {
  const element = document.createElement("div");
  element.className = role;
  element.textContent = text;
  byId("chat").append(element);
  byId("chat").scrollTop = byId("chat").scrollHeight;
  return element;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const parts = pending.split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  bubble("user", text);
  const element = bubble("assistant", "");
  running = new AbortController();
  byId("stop").disabled = false;
  let reply = "";
  try {
    const body = {
      messages: conversation, stream: true,
      temperature: Number(byId("temperature").value), max_tokens: Number(byId("max-tokens").value),
    };
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) reply += choice.delta.content || "";
      element.textContent = reply;
      byId("chat").scrollTop = byId("chat").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") bubble("error", error.message);
  }
  if (reply) conversation.push({ role: "assistant", content: reply });
  else conversation.pop();
  running = null;
  byId("stop").disabled = true;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (!text || running) return;
  byId("message").value = "";
  ask(text);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("clear").addEventListener("click", () => {
  if (running) running.abort();
  conversation.length = 0;
  byId("chat").replaceChildren();
});

refresh();
