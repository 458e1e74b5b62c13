"use strict";
// One generation at a time: a stream of /v1/completions, its tokens coloured by the exit that emitted them.

const COLOURS = 5;
const at = (id) => document.getElementById(id);
let model = null, running = null, kept = null, generated = false;

function headers() {
  const found = { "content-type": "application/json" };
  if (at("key").value) found.authorization = `Bearer ${at("key").value}`;
  return found;
}

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

async function problem(response) {
  if (response.status === 401) {
    at("keyed").hidden = false;
    return "This server wants an API key: enter it below the threshold.";
  }
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

async function load() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    at("facts").textContent = "";
    say(await problem(response), true);
    return;
  }
  model = (await response.json()).data[0];
  const facts = model.eeplan, exits = facts.exit_layers.join(", ");
  document.title = `${model.id} – eeplan`;
  at("model").textContent = model.id;
  at("facts").textContent = `${facts.checkpoint}, ${facts.num_layers} layers, ` +
    (exits ? `exits after layer ${exits}` : "no early exit") + `, up to ${facts.max_model_len} tokens`;
  at("mode").replaceChildren(...facts.decode_modes.map((name) => new Option(name, name, false, name === facts.decode_mode)));
  setThreshold(facts.early_exit_threshold);
  if (facts.certificate) {
    at("promise").hidden = at("calibrated").hidden = false;
    at("statement").textContent = `Calibrated on ${facts.certificate.data}: ${facts.certificate.statement}.`;
    at("assumption").textContent = `Assumed: ${facts.certificate.assumption}.`;
  }
  histogram({});
}

// The server's thresholds may be one for each exit; the slider then shows the first until it is moved.
function setThreshold(thresholds) {
  kept = thresholds.length > 1 ? thresholds : null;
  at("threshold").value = thresholds[0];
  at("value").textContent = thresholds.map((one) => Number(one).toFixed(2)).join(", ");
}

function threshold() {
  return kept ?? Number(at("threshold").value);
}

function exitIndex(name) {
  return name === "final" ? "final" : String(model.eeplan.exit_layers.indexOf(Number(name.slice(5))) % COLOURS);
}

function exitName(name) {
  return name === "final" ? "last layer" : `exit after layer ${name.slice(5)}`;
}

function histogram(exits) {
  const names = [...model.eeplan.exit_layers.map((layer) => `exit_${layer}`), "final"];
  const total = names.reduce((sum, name) => sum + (exits[name] ?? 0), 0);
  const rows = names.map((name) => {
    const row = document.createElement("tr"), head = document.createElement("th"), label = document.createElement("span");
    head.scope = "row";
    label.textContent = exitName(name);
    label.dataset.exit = exitIndex(name);
    head.append(label);
    const count = document.createElement("td"), share = document.createElement("td"), bar = document.createElement("span");
    count.textContent = exits[name] ?? 0;
    const part = total ? (exits[name] ?? 0) / total : 0;
    bar.className = "bar";
    bar.dataset.exit = exitIndex(name);
    bar.style.width = `${70 * part}%`;
    share.append(bar, `${(100 * part).toFixed(1)} %`);
    row.append(head, count, share);
    return row;
  });
  at("exits").tBodies[0].replaceChildren(...rows);
}

function show(token) {
  const span = document.createElement("span");
  span.textContent = token.text;
  span.dataset.exit = exitIndex(token.exit);
  span.dataset.said = `“${token.text}”: ${exitName(token.exit)}, confidence ${token.confidence.toFixed(3)}, ` +
    `${(1000 * token.latency_s).toFixed(1)} ms`;
  span.title = span.dataset.said;
  span.tabIndex = at("text").querySelector("[tabindex='0']") ? -1 : 0;
  at("text").append(span);
}

function focusOn(span) {
  for (const other of at("text").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  span.tabIndex = 0;
  span.focus();
}

async function generate() {
  running?.abort();
  const mine = running = new AbortController();
  const exits = {};
  let count = 0, depths = 0, first = 0, summary = null;
  generated = true;
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = at("prompt").value;
  at("text").replaceChildren(prompt);
  at("stop").disabled = false;
  for (const id of ["speed", "depth", "first"]) at(id).textContent = "–";
  histogram(exits);
  say("Generating …");
  const began = performance.now();
  try {
    const response = await fetch("v1/completions", {
      method: "POST", headers: headers(), signal: mine.signal,
      body: JSON.stringify({
        model: model.id, prompt: at("prompt").value, stream: true, exit_details: true,
        max_tokens: Number(at("tokens").value), temperature: Number(at("temperature").value),
        early_exit_threshold: threshold(), decode_mode: at("mode").value,
      }),
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const token of chunk.choices[0]?.eeplan?.tokens ?? []) {
        first ||= performance.now() - began;
        exits[token.exit] = (exits[token.exit] ?? 0) + 1;
        depths += token.depth;
        count += 1;
        show(token);
      }
      summary = chunk.eeplan ?? summary;
      figures(exits, count, depths, first, (performance.now() - began) / 1000);
    }
    const end = summary && summary.calibrated ? " The calibration's promise holds for this text's thresholds." : "";
    say(`Done: ${count} tokens.${end}`);
  } catch (error) {
    if (running !== mine) return;
    say(error.name === "AbortError" ? `Stopped after ${count} tokens.` : error.message, error.name !== "AbortError");
  } finally {
    if (running === mine) {
      running = null;
      at("stop").disabled = true;
    }
  }
}

function figures(exits, count, depths, first, seconds) {
  histogram(exits);
  if (!count) return;
  at("speed").textContent = `${(count / seconds).toFixed(1)} tokens/s`;
  at("depth").textContent = `${(depths / count).toFixed(2)} of ${model.eeplan.num_layers} layers`;
  at("first").textContent = `${first.toFixed(0)} ms`;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (model) generate(); else load();
});
at("stop").addEventListener("click", () => running?.abort());
at("threshold").addEventListener("input", () => {
  kept = null;
  at("value").textContent = Number(at("threshold").value).toFixed(2);
});
at("threshold").addEventListener("change", () => { if (generated) generate(); });
at("calibrated").addEventListener("click", () => {
  setThreshold(model.eeplan.early_exit_threshold);
  if (generated) generate();
});
at("key").addEventListener("change", load);
at("text").addEventListener("keydown", (event) => {
  const here = document.activeElement, step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step || here.parentElement !== at("text")) return;
  event.preventDefault();
  let next = here;
  do next = step > 0 ? next.nextElementSibling : next.previousElementSibling;
  while (next && (!next.dataset.said || !next.textContent));
  if (next) focusOn(next);
});
at("text").addEventListener("focusin", (event) => {
  if (event.target.dataset.said) at("token").textContent = event.target.dataset.said;
});
load();
